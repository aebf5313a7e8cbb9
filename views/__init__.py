"""Derived streams: windows, joins, patterns, standing searches and folds of the log. None is built yet."""
