"""The log as a Spark data source. Imported only by code that uses Spark."""
