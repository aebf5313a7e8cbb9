"""The servers of a pipeline on several machines: a Spark cluster, Kafka with several brokers, an object store."""
