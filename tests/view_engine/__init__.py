"""A small real engine for views, and a kind of view that copies one table, to test what is around the engine.

`sitecustomize` plants both in every process that has this folder in PYTHONPATH.
"""
