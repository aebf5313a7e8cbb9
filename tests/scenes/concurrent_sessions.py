"""Sessions that write to the same few keys of a real database at once: everything that Postgres lets them do.

A seed gives every session the same statements again. How the server interleaves them is its own affair, so a failure
is replayed from the log that it left: the log and the cuts between batches are all that the stores depend on.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.fix_processes import wait_until
from tests.fix_servers import Database

KEYS, CODES = 7, "abcdefg"
_COLUMNS = "(id int not null, code text, label text, big text)"
_LARGE = 700
"""Repeats of a word of four letters: more than 2 kB, so the server stores it out of line and does not send it again."""
TABLES = ("items", "users", "notes", "shifted")
SCHEMA = (
    *(f"create table {table} {_COLUMNS}" for table in TABLES),
    *(f"alter table {table} alter column big set storage external" for table in TABLES),
    "alter table items add primary key (id)",
    "create unique index on users (code)",  # made before the key's, so it is checked before it
    "alter table users add primary key (id)",
    "alter table notes add primary key (id)",
    "create unique index on notes (code)",
    "alter table notes replica identity full",
    "alter table shifted add primary key (id) deferrable initially deferred",
    "alter table shifted replica identity full",
)
_REFUSED = (
    psycopg.errors.IntegrityError,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.CardinalityViolation,
    psycopg.errors.ObjectInUse,  # a truncate behind a deferred check in the same transaction
)
"""What the source itself refuses, and an application has to live with."""


class Session(threading.Thread):
    """One application at work."""

    def __init__(self, database: Database, seed: str, transactions: int) -> None:
        super().__init__(daemon=True)
        self._database = database
        self._rng = random.Random(seed)
        self._transactions = transactions
        self.may_truncate = False
        self.committed = 0
        self.refused = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with self._database.connect(autocommit=False) as connection:
                connection.execute("set session deadlock_timeout = '10ms'")
                connection.commit()
                for _ in range(self._transactions):
                    self._transaction(connection)
        except BaseException as error:
            self.failure = error

    def _transaction(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        try:
            for _ in range(self._rng.choice([1, 1, 2, 3, 4])):
                self._act(connection)
            if self._rng.random() < 0.25:
                connection.execute("savepoint inner_part")
                self._act(connection)
                undone = self._rng.random() < 0.5
                connection.execute("rollback to inner_part" if undone else "release inner_part")
                self._act(connection)
            if self._rng.random() < 0.08:
                connection.rollback()
                return
            connection.commit()
            self.committed += 1
        except _REFUSED:
            connection.rollback()
            self.refused += 1

    def _act(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        table = self._rng.choice(TABLES)
        if self._rng.random() < 0.2:
            self._copy(connection, table)
        else:
            connection.execute(self._statement(table).encode())

    def _copy(self, connection: psycopg.Connection[tuple[object, ...]], table: str) -> None:
        """Several keys at once, most often in the place of the rows that have them."""
        rows = [self._row(key) for key in self._rng.sample(range(KEYS), self._rng.randint(1, 4))]
        if self._rng.random() < 0.7:
            clash = "id = any(%s) or code = any(%s)" if self._rng.random() < 0.7 else "id = %s or code = any(%s)"
            keys = [row[0] for row in rows] if "any(%s) or" in clash else rows[0][0]
            connection.execute(f"delete from {table} where {clash}".encode(), (keys, [row[1] for row in rows]))
        with connection.cursor().copy(f"copy {table} from stdin".encode()) as copy:
            for row in rows:
                copy.write_row(row)

    def _statement(self, table: str) -> str:
        rng, (key, code, word, big) = self._rng, self._row(self._rng.randrange(KEYS))
        values = f"({key}, '{code}', '{word}', '{big}')"
        common = [
            f"insert into {table} values {values}",
            f"update {table} set label = '{word}' where id = {key}",
            f"update {table} set label = '{word}', code = '{code}' where id = {key}",
            f"update {table} set big = '{big}' where id = {key}",
            f"update {table} set id = {rng.randrange(KEYS)}, label = '{word}' where id = {key}",
            f"delete from {table} where id = {key}",
            f"delete from {table} where id in ({key}, {rng.randrange(KEYS)})",
            f"merge into {table} t using (values ({key}, '{code}')) s(id, code) on t.id = s.id"
            f" when matched and t.code = s.code then delete when matched then update set label = '{word}'"
            f" when not matched then insert values {values}",
        ]
        upserts = [
            f"insert into {table} values {values} on conflict do nothing",
            f"insert into {table} values {values} on conflict (id) do update set label = '{word}'",
            f"insert into {table} values {values} on conflict (id) do update set label = excluded.label,"
            " big = excluded.big, code = excluded.code",
        ]
        shifts = [  # every key for a moment held by two rows; those that left the range make room again
            f"update {table} set id = id + 1",
            f"update {table} set id = {KEYS} - id",
            f"delete from {table} where id not between 0 and {KEYS}",
        ]
        rare = rng.random()
        if rare < 0.01 and self.may_truncate:
            return rng.choice([f"truncate {table}", f"truncate {table}, {rng.choice(TABLES)}"])
        if rare < 0.02 and table != "shifted":  # large enough to be streamed while it is open
            return f"insert into {table} select g, null, '{word}', '{big}' from generate_series(100, 180) g"
        if rare < 0.03:
            return f"delete from {table} where id >= 100"
        return rng.choice(common + (shifts if table == "shifted" else upserts))

    def _row(self, key: int) -> tuple[int, str, str, str]:
        word = f"w{self._rng.randrange(100, 1000)}"
        return key, self._rng.choice(CODES), word, word * self._rng.choice([1, _LARGE])


class Work:
    """Sessions at work side by side."""

    def __init__(self, sessions: list[Session]) -> None:
        self._sessions = sessions

    @property
    def committed(self) -> int:
        return sum(session.committed for session in self._sessions)

    @property
    def refused(self) -> int:
        return sum(session.refused for session in self._sessions)

    @property
    def ended(self) -> bool:
        return not any(session.is_alive() for session in self._sessions)

    def allow_truncates(self) -> None:
        """From here on. A snapshot locks one table after the other, and may lose a deadlock against a truncate."""
        for session in self._sessions:
            session.may_truncate = True

    def finish(self, deadline: float) -> None:
        """Wait for the last transaction; nothing but what the source itself refuses may have failed."""
        wait_until(lambda: self.ended, deadline, "the sessions' last transactions")
        for session in self._sessions:
            if session.failure is not None:
                raise session.failure


@contextmanager
def at_work(database: Database, seed: int, sessions: int, transactions: int) -> Iterator[Work]:
    """So many sessions, each with so many transactions, from here on."""
    work = Work([Session(database, f"{seed}-{number}", transactions) for number in range(sessions)])
    for session in work._sessions:
        session.start()
    yield work
    work.finish(60)
