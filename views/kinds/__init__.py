"""The kinds of view, one module each: found by `views.registry`."""
