"""The log as Spark sees it. Imported only by those who use Spark."""
