"""The steps that turn changes of tables into changes of a view, batch by batch. No clock, socket or Spark."""
