"""A model of Postgres at the grain at which its sessions interleave: what is in the WAL, and what others see of it.

- A tuple is in the WAL before its unique indexes are looked at, one after the other; COPY logs all of its tuples first.
- Whoever meets a row of a transaction that is not over waits for it there, also between two indexes. A tuple that is
  not in an index yet is not seen by those who look there.
- A commit is over only some time after its record was written: until then others wait for it.
- Savepoints, unique violations and deadlocks undo tuples that are in the WAL already.

Nothing here uses the code under test. Sessions are generators: one step of one session at a time, as a seed chooses.
"""

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

KEYS, CODES = 5, 9
Steps = Generator[None]


@dataclass(frozen=True, slots=True)
class Values:
    """A row: `id` is the key, `code` is unique too, `big` is not sent by an update that does not touch it."""

    id: int
    code: int
    label: int
    big: int


@dataclass(frozen=True, slots=True)
class Change:
    """One record in the WAL: c, u, d, t, or m for an update of the key."""

    lsn: int
    op: str
    old: Values | None = None
    new: Values | None = None


class Refused(Exception):
    """A unique violation or a deadlock: the transaction is rolled back."""


@dataclass(eq=False, slots=True)
class Transaction:
    """What one transaction wrote; `over` once others see how it ended."""

    changes: list[Change] = field(default_factory=list)
    created: "list[Tuple]" = field(default_factory=list)
    deleted: "list[Tuple]" = field(default_factory=list)
    waits_for: "Transaction | None" = None
    writes: bool = False
    over: bool = False
    commit_lsn: int = 0
    end_lsn: int = 0


@dataclass(eq=False, slots=True)
class Tuple:
    """One version of a row in the heap."""

    values: Values
    creator: Transaction
    deleter: Transaction | None = None
    indexed: set[str] = field(default_factory=set)


class Server:
    """One table. `committed` are its transactions in the order of their commit records."""

    def __init__(self, seed: int, sessions: int = 5, transactions: int = 6) -> None:
        self.rng = random.Random(seed)
        self.lsn = 1000
        self.committed: list[Transaction] = []
        self._indexes = self.rng.choice([("id", "code"), ("code", "id")])
        self._heap: list[Tuple] = []
        self._open: list[Transaction] = []
        self._exclusive: Transaction | None = None
        self._run([self._session(transactions) for _ in range(sessions)])

    def state(self) -> dict[int, Values]:
        """The table at the end, as a select gives it."""
        return {row.values.id: row.values for row in self._heap if row.deleter is None}

    def _run(self, sessions: list[Steps]) -> None:
        while sessions:
            session = self.rng.choice(sessions)
            try:
                next(session)
            except StopIteration:
                sessions.remove(session)

    def _session(self, transactions: int) -> Steps:
        for _ in range(transactions):
            mine = Transaction()
            self._open.append(mine)
            try:
                for _ in range(self.rng.randint(1, 4)):
                    yield from self._savepoint(mine) if self.rng.random() < 0.15 else self._statement(mine)
                    yield
                if mine.changes:
                    mine.commit_lsn, mine.end_lsn = self._logged(), self.lsn
                    self.committed.append(mine)
                    for _ in range(self.rng.randint(0, 6)):  # written, and waiting for the disk or a standby
                        yield
            except Refused:
                self._undo(mine, (0, 0, 0))
            self._end(mine)

    def _end(self, mine: Transaction) -> None:
        mine.over = True
        self._open.remove(mine)
        self._heap = [row for row in self._heap if row.deleter is not mine]
        if self._exclusive is mine:
            self._exclusive = None

    def _logged(self) -> int:
        """Where the next record lies; the WAL ends behind it."""
        at, self.lsn = self.lsn, self.lsn + 8 * self.rng.randint(4, 12)
        return at

    # -- statements

    def _savepoint(self, mine: Transaction) -> Steps:
        before = (len(mine.changes), len(mine.created), len(mine.deleted))
        yield from self._statement(mine)
        if self.rng.random() < 0.6:
            self._undo(mine, before)

    def _undo(self, mine: Transaction, before: tuple[int, int, int]) -> None:
        changes, created, deleted = before
        gone = mine.created[created:]
        self._heap = [row for row in self._heap if row not in gone]
        for row in mine.deleted[deleted:]:
            row.deleter = None
        del mine.changes[changes:], mine.created[created:], mine.deleted[deleted:]

    def _statement(self, mine: Transaction) -> Steps:
        key, chance = self.rng.randrange(KEYS), self.rng.random()
        if chance < 0.03:
            yield from self._truncate(mine)
            return
        while self._exclusive not in (None, mine) and not mine.writes:
            yield from self._wait(mine, self._exclusive)
        mine.writes = True
        if chance < 0.4:
            yield from self._copy(mine, self.rng.sample(range(KEYS), self.rng.randint(1, 3)))
        elif chance < 0.5:
            yield from self._upsert(mine, self._row(key))
        elif chance < 0.75:
            yield from self._delete(mine, key)
        else:
            yield from self._update(mine, key)

    def _row(self, key: int) -> Values:
        code = key if self.rng.random() < 0.6 else self.rng.randrange(CODES)
        return Values(key, code, self.rng.randrange(1000), self.rng.randrange(1000))

    def _copy(self, mine: Transaction, keys: Sequence[int]) -> Steps:
        """Most often in the place of some of the rows that have these keys."""
        for key in keys[: self.rng.randint(len(keys) // 2, len(keys))]:
            yield from self._delete(mine, key)
        yield from self._insert(mine, [self._row(key) for key in keys])

    def _insert(self, mine: Transaction, rows: Sequence[Values]) -> Steps:
        at = self._logged()
        made = [self._put(mine, Change(at, "c", None, row)) for row in rows]
        for each in made:
            yield
            yield from self._index(mine, each)

    def _upsert(self, mine: Transaction, row: Values) -> Steps:
        while True:
            held = yield from self._locked(mine, row.id)
            if held is not None:
                yield from self._replace(mine, held, replace(row, code=held.values.code))
                return
            before = (len(mine.changes), len(mine.created), len(mine.deleted))
            made = self._put(mine, Change(self._logged(), "c", None, row))
            yield
            rival = next(self._rivals(mine, made, "id"), None)
            if rival is None:
                yield from self._index(mine, made)
                return
            self._undo(mine, before)  # somebody was faster: taken back, without a confirmation in the WAL
            if (other := self._undecided(rival)) is not None:
                yield from self._wait(mine, other)

    def _delete(self, mine: Transaction, key: int) -> Steps:
        held = yield from self._locked(mine, key)
        if held is not None:
            self._drop(mine, held)
            mine.changes.append(Change(self._logged(), "d", held.values))

    def _update(self, mine: Transaction, key: int) -> Steps:
        held = yield from self._locked(mine, key)
        if held is None:
            return
        kind, wanted = self.rng.random(), self._row(self.rng.randrange(KEYS))
        if kind < 0.3:
            new = replace(held.values, label=wanted.label, big=wanted.big)
        elif kind < 0.6:
            new = replace(held.values, label=wanted.label)
        elif kind < 0.75:
            new = replace(held.values, code=wanted.code)
        else:
            new = replace(held.values, id=wanted.id, big=wanted.big)
        yield from self._replace(mine, held, new)

    def _replace(self, mine: Transaction, held: Tuple, new: Values) -> Steps:
        old = held.values
        self._drop(mine, held)
        made = self._put(mine, Change(self._logged(), "u" if old.id == new.id else "m", old, new))
        if (old.id, old.code) == (new.id, new.code):
            made.indexed = set(held.indexed)
            return
        yield
        yield from self._index(mine, made)

    def _truncate(self, mine: Transaction) -> Steps:
        while self._exclusive not in (None, mine):
            yield from self._wait(mine, self._exclusive)
        self._exclusive = mine  # those who do not write yet queue behind
        while others := [each for each in self._open if each.writes and each is not mine]:
            yield from self._wait(mine, others[0])
        mine.writes = True
        for row in [row for row in self._heap if row.deleter is None]:
            self._drop(mine, row)
        mine.changes.append(Change(self._logged(), "t"))

    # -- rows, locks and indexes

    def _put(self, mine: Transaction, change: Change) -> Tuple:
        assert change.new is not None
        made = Tuple(change.new, mine)
        self._heap.append(made)
        mine.created.append(made)
        mine.changes.append(change)
        return made

    def _drop(self, mine: Transaction, row: Tuple) -> None:
        row.deleter = mine
        mine.deleted.append(row)

    def _locked(self, mine: Transaction, key: int) -> Generator[None, None, Tuple | None]:
        """The row that a statement sees under a key, once nobody else is about to remove it."""
        while True:
            yield
            seen = [row for row in self._heap if row.values.id == key and (row.creator.over or row.creator is mine)]
            held = next((row for row in seen if row.deleter is not mine), None)
            if held is None or held.deleter is None:
                return held
            yield from self._wait(mine, held.deleter)

    def _index(self, mine: Transaction, made: Tuple) -> Steps:
        for index in self._indexes:
            while rival := next(self._rivals(mine, made, index), None):
                other = self._undecided(rival)
                if other is None or other is mine:
                    raise Refused
                yield from self._wait(mine, other)
            made.indexed.add(index)
            yield

    def _undecided(self, row: Tuple) -> Transaction | None:
        """Whoever decides whether the row is there, once he is over; None: it is."""
        return row.deleter if row.creator.over else row.creator

    def _rivals(self, mine: Transaction, made: Tuple, index: str) -> Iterator[Tuple]:
        value: Callable[[Tuple], int] = lambda row: getattr(row.values, index)  # noqa: E731
        return (
            row
            for row in self._heap
            if row is not made and index in row.indexed and value(row) == value(made) and row.deleter is not mine
        )

    def _waited_for(self, ahead: Transaction | None) -> list[Transaction]:
        """A transaction, the one that it waits for, and so on; a circle of others once."""
        found: list[Transaction] = []
        while ahead is not None and ahead not in found:
            found.append(ahead)
            ahead = ahead.waits_for
        return found

    def _wait(self, mine: Transaction, other: Transaction) -> Steps:
        mine.waits_for = other
        try:
            while not other.over:
                if mine in self._waited_for(other):
                    raise Refused
                yield
        finally:
            mine.waits_for = None
