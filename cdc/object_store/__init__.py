"""Access to buckets by the S3 protocol, for the segment log and for Delta tables."""
