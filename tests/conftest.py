"""Fixtures come from the fix_*.py files beside this one."""

pytest_plugins = ["tests.fix_servers", "tests.fix_proxy", "tests.fix_processes", "tests.fix_spark", "tests.fix_pipeline"]
