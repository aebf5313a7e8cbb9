"""Dead letters: changes that a store rejects for good, each with its reason, in an SQLite file of the sink.

At most one dead letter per key: a later change of the key is merged with it and tried as one, so changes of a key are
never applied out of order. Dead letters contain row values: the file is readable by its owner only.
"""

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from cdc.durable_files import open_or_make
from cdc.fence import guard
from cdc.key_range import Removal

_TABLE = """
create table if not exists letters (
    "table" text not null, key text not null, op text not null, after text, unchanged text not null,
    version integer not null, commit_lsn integer not null, commit_ts text not null, schema_id integer not null,
    reason text not null, parked_at text not null, attempts integer not null, retry integer not null default 0,
    primary key ("table", key)
)
"""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A rejected change: a row of sinks.fold.spark.FOLDED with its reason."""

    table: str
    key: str
    op: str
    after: str | None
    unchanged: tuple[str, ...]
    version: int
    commit_lsn: int
    commit_ts: datetime
    schema_id: int
    reason: str
    parked_at: datetime
    attempts: int = 1


class DeadLetters:
    """The dead letters of one sink. Several processes may use the file at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "letters.db"
        os.close(open_or_make(path))
        self._path = path
        with self._open() as database:
            database.execute(_TABLE)

    def add(self, letters: Sequence[DeadLetter]) -> None:
        """Durable on return. Replaces the dead letter of the same key and adds one to its attempts."""
        with self._open() as database:
            guard.require()
            for letter in letters:
                values = asdict(letter) | {
                    "unchanged": json.dumps(letter.unchanged),
                    "commit_ts": letter.commit_ts.isoformat(),
                    "parked_at": letter.parked_at.isoformat(),
                }
                database.execute(_ADD, values)

    def resolve(self, table: str, versions: Sequence[tuple[str, int]]) -> None:
        """Delete the dead letters of these keys up to the version that the store now has."""
        with self._open() as database:
            database.executemany(
                'delete from letters where "table" = ? and key = ? and version <= ?',
                [(table, key, version) for key, version in versions],
            )

    def truncate(self, table: str, version: int) -> None:
        """Delete the dead letters that are older than a truncate of the table."""
        with self._open() as database:
            database.execute('delete from letters where "table" = ? and version < ?', (table, version))

    def remove(self, table: str, removed: Sequence[Removal]) -> None:
        """Delete the dead letters of keys in removed ranges."""
        with self._open() as database:
            rows = database.execute('select key, version from letters where "table" = ?', (table,)).fetchall()
        keys, versions = pa.array([key for key, _ in rows]), pa.array([version for _, version in rows], pa.int64())
        for removal in removed if rows else ():
            self.resolve(table, [tuple(rows[number]) for number in removal.removes(keys, versions).nonzero()[0]])

    def of_keys(self, table: str, keys: Sequence[str]) -> dict[str, DeadLetter]:
        """The dead letters of these keys. They may be large: ask `sizes` first, and read a few at a time."""
        query = 'select * from letters where "table" = ? and key in (select value from json_each(?))'
        with self._open() as database:
            found = [_letter(row) for row in database.execute(query, (table, json.dumps(keys)))]
        return {letter.key: letter for letter in found}

    def sizes(self, table: str, keys: Sequence[str]) -> dict[str, int]:
        """Which of these keys have dead letters, and the bytes of each."""
        query = (
            'select key, coalesce(length(cast(after as blob)), 0) from letters where "table" = ?'
            " and key in (select value from json_each(?))"
        )
        with self._open() as database:
            return dict(tuple(row) for row in database.execute(query, (table, json.dumps(keys))))

    def keys(self) -> dict[str, list[str]]:
        """All keys that have dead letters, by table."""
        found: dict[str, list[str]] = {}
        with self._open() as database:
            for table, key in database.execute('select "table", key from letters'):
                found.setdefault(table, []).append(key)
        return found

    def to_retry(self) -> dict[tuple[str, int], dict[str, int]]:
        """The keys marked for retry and the bytes of each, by table and schema."""
        found: dict[tuple[str, int], dict[str, int]] = {}
        query = (
            'select "table", schema_id, key, coalesce(length(cast(after as blob)), 0) from letters where retry'
            " order by 1, 2, parked_at, key"
        )
        with self._open() as database:
            for table, schema_id, key, size in database.execute(query):
                found.setdefault((table, schema_id), {})[key] = size
        return found

    def list(self, table: str | None = None, retry: bool | None = None) -> list[DeadLetter]:
        """All dead letters, those of a table, or those marked for retry; oldest first."""
        query = (
            'select * from letters where (:table is null or "table" = :table) and (:retry is null or retry = :retry)'
            " order by parked_at, key"
        )
        with self._open() as database:
            return [_letter(row) for row in database.execute(query, {"table": table, "retry": retry})]

    def count(self) -> int:
        """How many there are."""
        with self._open() as database:
            return int(database.execute("select count(*) from letters").fetchone()[0])

    def counts(self) -> dict[str, int]:
        """How many there are of each table."""
        with self._open() as database:
            return dict(database.execute('select "table", count(*) from letters group by 1 order by 1').fetchall())

    def ask_retry(self, table: str | None = None, key: str | None = None) -> int:
        """Mark dead letters for retry by the apply process; returns how many."""
        return self._execute("update letters set retry = 1", table, key)

    def drop(self, table: str | None = None, key: str | None = None) -> int:
        """Delete dead letters permanently; returns how many. The store lacks them until their keys change again."""
        return self._execute("delete from letters", table, key)

    def _execute(self, statement: str, table: str | None, key: str | None) -> int:
        where = ' where (:table is null or "table" = :table) and (:key is null or key = :key)'
        with self._open() as database:
            return database.execute(statement + where, {"table": table, "key": key}).rowcount

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection per call: calls come from several threads of Spark, and they are rare."""
        database = sqlite3.connect(self._path, timeout=30)
        database.row_factory = sqlite3.Row
        try:
            with database:
                yield database
        finally:
            database.close()


_ADD = """
insert into letters ("table", key, op, after, unchanged, version, commit_lsn, commit_ts, schema_id, reason, parked_at,
                     attempts)
values (:table, :key, :op, :after, :unchanged, :version, :commit_lsn, :commit_ts, :schema_id, :reason, :parked_at,
        :attempts)
on conflict ("table", key) do update set
    op = excluded.op, after = excluded.after, unchanged = excluded.unchanged, version = excluded.version,
    commit_lsn = excluded.commit_lsn, commit_ts = excluded.commit_ts, schema_id = excluded.schema_id,
    reason = excluded.reason, attempts = letters.attempts + 1, retry = 0
where excluded.version >= letters.version
"""


def _letter(row: sqlite3.Row) -> DeadLetter:
    values = {name: row[name] for name in row.keys() if name != "retry"}  # noqa: SIM118  iterating gives values
    values |= {"unchanged": tuple(json.loads(row["unchanged"]))}
    values |= {name: datetime.fromisoformat(row[name]).astimezone(UTC) for name in ("commit_ts", "parked_at")}
    return DeadLetter(**values)
