"""One empty DuckDB database in this process. It evaluates expressions over Arrow tables and can open no file.

Each use is a cursor of its own: a cursor serves one thread at a time.
"""

import os
import threading

import duckdb

_LOCK = threading.Lock()
_DATABASES: dict[int, duckdb.DuckDBPyConnection] = {}
"""By process: a database does not survive a fork."""


def cursor() -> duckdb.DuckDBPyConnection:
    """A connection to the database. One thread of DuckDB: callers have threads of their own, one per sink."""
    with _LOCK:
        database = _DATABASES.get(os.getpid())
        if database is None:
            database = _DATABASES[os.getpid()] = _opened()
    connection = database.cursor()
    connection.execute("set TimeZone = 'UTC'")
    return connection


def _opened() -> duckdb.DuckDBPyConnection:
    database = duckdb.connect(
        ":memory:",
        config={
            "threads": 1,
            "enable_external_access": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        },
    )
    database.execute("set preserve_insertion_order = true")
    return database
