"""The demo: a small shop database, a workload, and a comparison of every row in every sink with the source."""
