"""Runs the examples of the folder `examples/`: each a pipeline with a view, and changes to follow in a store."""
