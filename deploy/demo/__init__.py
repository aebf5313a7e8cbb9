"""The demonstration: a small shop, a bounded workload, and the proof that every store equals the source."""
