"""The tables, changes and views of each measured kind. The same seed makes the same changes in the same order.

`documents`: orders with their items and their customer. `joins`: the posts of those whom somebody follows. `windows`:
revenue per minute of orders, of which one in twenty comes up to half an hour late.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

_PER_TRANSACTION = 20
_SESSIONS = 4
_SCALE = 10
"""Rows of the largest tables are a multiple of this many thousand at SCALE 1."""
Choice = tuple[float, Callable[[random.Random, "Numbers"], str]]


@dataclass(slots=True)
class Numbers:
    """How many rows were loaded, and the numbers of rows that a session adds: no two sessions add the same."""

    scale: int
    next: int
    step: int

    def fresh(self) -> int:
        """A number that no row has."""
        self.next += self.step
        return self.next


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of view with its tables; `load` is SQL with the placeholder {n}, thousands of rows.

    `choices` are statements that change one row, with their share; `steady` is one that always changes the result.
    """

    name: str
    tables: tuple[str, ...]
    load: tuple[str, ...]
    choices: tuple[Choice, ...]
    steady: Callable[[random.Random, Numbers], str]
    view: Mapping[str, Any]

    def create(self, dsn: str, scale: int) -> None:
        """Make the tables and their rows."""
        with psycopg.connect(dsn, autocommit=True) as connection:
            for table in reversed(self.tables):
                connection.execute(f"drop table if exists {table}".encode())
            for statement in self.load:
                connection.execute(statement.format(n=scale * _SCALE * 1_000).encode())

    def churn(self, dsn: str, changes: int, scale: int, seed: int) -> None:
        """Make about so many changes, twenty in a transaction; synchronous_commit is off for this session."""
        rng, numbers = random.Random(seed), self._numbers(scale, seed, 0)
        shares = [share for share, _ in self.choices]
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("set synchronous_commit = off")
            for _ in range(changes // _PER_TRANSACTION):
                made = rng.choices(self.choices, shares, k=_PER_TRANSACTION)
                statements = (make(rng, numbers) for _, make in made)
                connection.execute(("begin;" + ";".join(statements) + ";commit").encode())

    def commit_steadily(self, dsn: str, rate: float, seconds: float, scale: int, seed: int) -> float:
        """Commit so many one-row transactions a second, evenly; returns the longest delay behind the schedule."""
        start = time.time() + 0.5
        delays: list[float] = []

        def work(number: int) -> None:
            rng, numbers, late = random.Random(seed + number), self._numbers(scale, seed, number), 0.0
            with psycopg.connect(dsn, autocommit=True) as connection:
                for count in range(int(rate * seconds) // _SESSIONS):
                    due = start + (count * _SESSIONS + number) / rate
                    if (left := due - time.time()) > 0:
                        time.sleep(left)
                    late = max(late, -left)
                    connection.execute(self.steady(rng, numbers).encode())
            delays.append(late)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(_SESSIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(delays)

    def _numbers(self, scale: int, seed: int, session: int) -> Numbers:
        return Numbers(scale * _SCALE * 1_000, 1_000_000_000 + seed * 10_000_000 + session, _SESSIONS)


def _deleted(table: str, near: int) -> str:
    """Delete the row with this number, or the next one that is there."""
    return f"delete from {table} where id = (select min(id) from {table} where id >= {near})"


# -- documents

_NEW_ITEM = (
    "insert into public.items select {id}, {order}, 'product ' || {id} % 500, 1 + {id} % 9, {id} % 10000 / 100.0"
)


def _item_changed(rng: random.Random, numbers: Numbers) -> str:
    return f"update public.items set quantity = quantity % 9 + 1 where id = {rng.randint(1, numbers.scale)}"


def _item_added(rng: random.Random, numbers: Numbers) -> str:
    return _NEW_ITEM.format(id=numbers.fresh(), order=rng.randint(1, numbers.scale // 3))


def _item_removed(rng: random.Random, numbers: Numbers) -> str:
    return _deleted("public.items", rng.randint(1, numbers.scale))


def _order_changed(rng: random.Random, numbers: Numbers) -> str:
    order = rng.randint(1, numbers.scale // 3)
    return f"update public.orders set status = 'status {rng.randint(1, 9999)}' where id = {order}"


def _customer_changed(rng: random.Random, numbers: Numbers) -> str:
    city = rng.randint(1, 9999)
    return f"update public.customers set city = 'city {city}' where id = {rng.randint(1, numbers.scale // 15)}"


DOCUMENTS = Workload(
    "documents",
    ("public.customers", "public.orders", "public.items"),
    (
        "create table public.customers (id bigint primary key, name text not null, city text not null)",
        "create table public.orders (id bigint primary key, customer_id bigint not null references public.customers,"
        " status text not null)",
        "create table public.items (id bigint primary key, order_id bigint not null references public.orders,"
        " product text not null, quantity int not null, price numeric(10,2) not null)",
        "create index on public.items (order_id)",
        "alter table public.items replica identity full",  # peers find the order of a deleted item there
        "insert into public.customers select g, 'customer ' || g, 'city ' || g % 97"
        " from generate_series(1, {n} / 15) g",
        "insert into public.orders select g, 1 + g % ({n} / 15), 'new' from generate_series(1, {n} / 3) g",
        "insert into public.items select g, 1 + (g - 1) % ({n} / 3), 'product ' || g % 500, 1 + g % 9,"
        " g % 10000 / 100.0 from generate_series(1, {n}) g",
    ),
    (
        (0.55, _item_changed),
        (0.10, _item_added),
        (0.10, _item_removed),
        (0.20, _order_changed),
        (0.05, _customer_changed),
    ),
    _item_changed,
    {
        "name": "order_documents",
        "kind": "documents",
        "root": "public.orders",
        "include": [
            {"table": "public.items", "name": "items"},
            {"table": "public.customers", "name": "customer"},
        ],
    },
)

# -- a join of two tables


def _posted(rng: random.Random, numbers: Numbers) -> str:
    own = numbers.fresh()
    return f"insert into public.posts values ({own}, {rng.randint(1, numbers.scale // 10)}, 'post {own}')"


def _post_changed(rng: random.Random, numbers: Numbers) -> str:
    return f"update public.posts set title = 'title {rng.randint(1, 9999)}' where id = {rng.randint(1, numbers.scale)}"


def _post_removed(rng: random.Random, numbers: Numbers) -> str:
    return _deleted("public.posts", rng.randint(1, numbers.scale))


def _followed(rng: random.Random, numbers: Numbers) -> str:
    return f"insert into public.follows values ({numbers.fresh()}, {rng.randint(1, numbers.scale // 10)})"


def _unfollowed(rng: random.Random, numbers: Numbers) -> str:
    follower = rng.randint(1, numbers.scale // 10)
    first = f"(select min(followee) from public.follows where follower = {follower})"
    return f"delete from public.follows where follower = {follower} and followee = {first}"


JOINS = Workload(
    "joins",
    ("public.posts", "public.follows"),
    (
        "create table public.posts (id bigint primary key, author bigint not null, title text not null)",
        "create table public.follows (follower bigint, followee bigint, primary key (follower, followee))",
        "alter table public.posts replica identity full",  # peers find the author of a deleted post there
        "insert into public.posts select g, 1 + g % ({n} / 10), 'post ' || g from generate_series(1, {n}) g",
        "insert into public.follows select 1 + g % ({n} / 10), 1 + (g * 7 + g / ({n} / 10) * 31) % ({n} / 10)"
        " from generate_series(1, {n} / 2) g on conflict do nothing",
    ),
    ((0.35, _posted), (0.40, _post_changed), (0.10, _post_removed), (0.08, _followed), (0.07, _unfollowed)),
    _posted,
    {
        "name": "timelines",
        "kind": "query",
        "sql": "select f.follower, f.followee, p.id as post, p.title"
        " from public.follows f join public.posts p on p.author = f.followee",
    },
)

# -- a windowed aggregate

_LATE = 0.05


def _placed(rng: random.Random, numbers: Numbers) -> str:
    late = f" - interval '{rng.randint(1, 1800)} seconds'" if rng.random() < _LATE else ""
    return f"insert into public.sales values ({numbers.fresh()}, clock_timestamp(){late}, {rng.randint(100, 99999)})"


def _corrected(rng: random.Random, numbers: Numbers) -> str:
    return f"update public.sales set cents = {rng.randint(100, 99999)} where id = {rng.randint(1, numbers.scale)}"


def _cancelled(rng: random.Random, numbers: Numbers) -> str:
    return _deleted("public.sales", rng.randint(1, numbers.scale))


WINDOWS = Workload(
    "windows",
    ("public.sales",),
    (
        "create table public.sales (id bigint primary key, placed_at timestamptz not null, cents bigint not null)",
        "alter table public.sales replica identity full",  # peers find what to take back there
        "insert into public.sales select g, now() - ({n} - g) * interval '0.2 seconds', 100 + g % 9999"
        " from generate_series(1, {n}) g",
    ),
    ((0.80, _placed), (0.15, _corrected), (0.05, _cancelled)),
    _placed,
    {
        "name": "revenue_per_minute",
        "kind": "query",
        "sql": "select date_trunc('minute', placed_at) as minute, sum(cents) as cents, count(*) as sales"
        " from public.sales group by date_trunc('minute', placed_at)",
    },
)

WORKLOADS: Sequence[Workload] = (DOCUMENTS, JOINS, WINDOWS)
