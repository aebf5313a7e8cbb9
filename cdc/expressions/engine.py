"""One empty DuckDB database in this process. It evaluates expressions over Arrow tables and can open no file.

Each use is a cursor of its own: a cursor serves one thread at a time.
"""

import os
import threading
import warnings
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa

# The copy that it warns of costs 2 ns per row; the other way, a query planned anew, a millisecond per batch.
warnings.filterwarnings("ignore", "Arrow output on a DB-API result", UserWarning)

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


class _Given:
    """The relation of a prepared statement: each execution reads the table of that time. DuckDB checks its schema."""

    table: pa.Table

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)  # type: ignore[no-untyped-call]

    def __arrow_c_schema__(self) -> object:
        return self.table.schema.__arrow_c_schema__()


@dataclass(frozen=True, slots=True)
class Statements:
    """Prepared statements over Arrow tables, each planned once: for a small batch, planning is most of the cost.

    The trap: a table registered again under its name is not seen by a statement that was prepared before; hence
    `_Given`.
    """

    _connection: duckdb.DuckDBPyConnection
    _relations: dict[pa.Schema, tuple[str, _Given]] = field(default_factory=dict)
    _prepared: dict[tuple[str, str], str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, select: str, rows: pa.Table, tail: str = "") -> pa.Table:
        """`SELECT <select> FROM <rows> <tail>`. May be called by several threads. Raises duckdb.Error."""
        with self._lock:
            relation, given = self._relation(rows)
            given.table = rows
            try:
                statement = self._statement(relation, f"SELECT {select} FROM {relation}{tail}")  # noqa: S608
                result: pa.Table = self._connection.execute(f"EXECUTE {statement}").to_arrow_table()  # type: ignore[assignment]
            finally:
                given.table = rows.schema.empty_table()
        return result

    def _relation(self, rows: pa.Table) -> tuple[str, _Given]:
        if rows.schema not in self._relations:
            name, given = f"given{len(self._relations)}", _Given(rows)
            self._connection.register(name, given)
            self._relations[rows.schema] = (name, given)
        return self._relations[rows.schema]

    def _statement(self, relation: str, query: str) -> str:
        if (relation, query) not in self._prepared:
            name = f"statement{len(self._prepared)}"
            self._connection.execute(f"PREPARE {name} AS {query}")
            self._prepared[relation, query] = name
        return self._prepared[relation, query]


def statements() -> Statements:
    """Prepared statements on a cursor of their own."""
    return Statements(cursor())


def quoted(name: str) -> str:
    """A name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _opened() -> duckdb.DuckDBPyConnection:
    database = duckdb.connect(
        ":memory:",
        config={
            "threads": 1,
            "enable_external_access": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
            "temp_directory": "",
        },
    )
    database.execute("set preserve_insertion_order = true")
    return database
