"""The order in which a table is read in chunks: by key, by pages if it has no key, or along a list of keys.

An order only builds queries; it reads nothing and has no state. A resume point is a few texts, so that a restart
continues where the last durable chunk ended.
"""

from collections.abc import Sequence
from typing import Protocol

from psycopg import sql

from snapshots.initial.plan import Leaf
from snapshots.tables.catalog import identifier
from snapshots.tables.rows import Readable

ResumePoint = tuple[str, ...]
_UNKNOWN = 30.0
"""Assumed rows per page of a table that was never analysed."""


class ChunkOrder(Protocol):
    """The order in which a table is read."""

    def query(self, resume: ResumePoint | None, limit: int) -> sql.Composed:
        """COPY of the chunk of about `limit` rows at a resume point; None: the first chunk."""

    def after(self, resume: ResumePoint | None, limit: int, rows: int, last: ResumePoint) -> ResumePoint | None:
        """Where to continue after a chunk that had `rows` rows and ended with the key `last`; None: at the end."""


def _source(readable: Readable) -> sql.Composed:
    return sql.SQL("{}" if readable.partitioned else "only {}").format(identifier(readable.table))


def _row(parts: Sequence[sql.Composable]) -> sql.Composed:
    return sql.SQL("({})").format(sql.SQL(", ").join(parts))


class KeyOrder:
    """By key, which needs only the key's unique index."""

    def __init__(self, readable: Readable, key: Sequence[str], conditions: Sequence[sql.Composable]) -> None:
        self._readable = readable
        self._key = [sql.Identifier(name) for name in key]
        self._conditions = conditions

    def query(self, resume: ResumePoint | None, limit: int) -> sql.Composed:
        order = sql.SQL(" order by {} limit {}").format(sql.SQL(", ").join(self._key), limit)
        beyond = []
        if resume is not None:
            beyond = [sql.SQL("{} > {}").format(_row(self._key), _row([sql.Literal(text) for text in resume]))]
        return self._readable.copy_query(_source(self._readable), *self._conditions, *beyond, tail=order)

    def after(self, resume: ResumePoint | None, limit: int, rows: int, last: ResumePoint) -> ResumePoint | None:
        return None if rows < limit else last


class PageOrder:
    """By pages of the leaves, for tables whose key is the whole row. Rows that an update moves are in the stream.

    A resume point is the file of a leaf and a page in it. The trap: VACUUM FULL and CLUSTER move rows without any
    change in the stream, so if the file has changed, reading starts again.
    """

    def __init__(
        self, readable: Readable, leaves: Sequence[Leaf], rows: int, conditions: Sequence[sql.Composable]
    ) -> None:
        pages = sum(leaf.pages for leaf in leaves)
        self._readable = readable
        self._leaves = leaves
        self._conditions = conditions
        self._density = max(1.0, (rows or _UNKNOWN * pages) / max(1, pages))

    def query(self, resume: ResumePoint | None, limit: int) -> sql.Composed:
        number, page = self._numbers(resume)
        if number >= len(self._leaves):
            return self._readable.copy_query(_source(self._readable), sql.SQL("false"))
        leaf = self._leaves[number]
        if leaf.whole:
            return self._readable.copy_query(_source(self._readable), *self._conditions)
        ranges = [sql.SQL("ctid >= {}::tid").format(f"({page},0)")]
        if (end := page + self._pages(limit)) < leaf.pages:
            ranges.append(sql.SQL("ctid < {}::tid").format(f"({end},0)"))
        relation = sql.SQL("only {}").format(identifier(leaf.name))
        return self._readable.copy_query(relation, *self._conditions, *ranges)

    def after(self, resume: ResumePoint | None, limit: int, rows: int, last: ResumePoint) -> ResumePoint | None:
        number, page = self._numbers(resume)
        if number < len(self._leaves) and not self._leaves[number].whole:
            page += self._pages(limit)
            if page < self._leaves[number].pages:
                return str(self._leaves[number].filenode), str(page)
        return (str(self._leaves[number + 1].filenode), "0") if number + 1 < len(self._leaves) else None

    def _numbers(self, resume: ResumePoint | None) -> tuple[int, int]:
        files = [str(leaf.filenode) for leaf in self._leaves]
        return (
            (files.index(resume[0]), int(resume[1])) if resume and len(resume) == 2 and resume[0] in files else (0, 0)
        )

    def _pages(self, limit: int) -> int:
        return max(1, int(limit / self._density))


class KeyListOrder:
    """Along a list of keys."""

    def __init__(
        self, readable: Readable, key: Sequence[str], keys: Sequence[ResumePoint], conditions: Sequence[sql.Composable]
    ) -> None:
        self._readable = readable
        self._key = _row([sql.Identifier(name) for name in key])
        self._keys = keys
        self._conditions = conditions

    def query(self, resume: ResumePoint | None, limit: int) -> sql.Composed:
        first = int(resume[0]) if resume else 0
        listed = [_row([sql.Literal(text) for text in key]) for key in self._keys[first : first + limit]]
        chosen = sql.SQL("{} in {}").format(self._key, _row(listed)) if listed else sql.SQL("false")
        return self._readable.copy_query(_source(self._readable), *self._conditions, chosen)

    def after(self, resume: ResumePoint | None, limit: int, rows: int, last: ResumePoint) -> ResumePoint | None:
        following = (int(resume[0]) if resume else 0) + limit
        return (str(following),) if following < len(self._keys) else None
