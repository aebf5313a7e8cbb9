"""The workload of every contender: the same rows, the same changes in the same order.

    python -m bench.workload --dsn DSN load|churn|steady [--rows N] [--changes N] [--tps N] [--seconds N]

`load` fills public.bench_orders. `churn` makes exactly so many row changes, 50 a transaction: 40 % inserts, 40 %
updates of loaded rows, 20 % deletes of its own inserts (seed 7). `steady` commits so many one-row updates a second over
eight connections. Ids and order are deterministic, only `updated_at` differs from run to run.
"""

import argparse
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psycopg

TABLE = "public.bench_orders"
_SCHEMA = Path(__file__).parent / "schema.sql"
_VALUES = """((g*7919)%1000)::int, (((g*104729)%10000000)/100.0)::numeric(12,2),
  substr(md5(g::text)||md5((g+1)::text)||md5((g+2)::text)||md5((g+3)::text),1,100), {stamp},
  jsonb_build_object('k',g%97,'tag','t'||(g%13),'nested',jsonb_build_object('a',g%5,'b',array[g%3,g%7])),
  g%2=0, md5('u'||g::text)::uuid, date '2020-01-01' + (g%3650)::int, g/7.0::double precision"""
_PREPARED = (
    "PREPARE i(bigint) AS INSERT INTO public.bench_orders SELECT g, "
    + _VALUES.format(stamp="clock_timestamp()")
    + " FROM (select $1 as g) s",
    "PREPARE u(bigint,int) AS UPDATE public.bench_orders SET qty=$2, amount=amount+1.25,"
    " updated_at=clock_timestamp(), score=score+0.5 WHERE id=$1",
    "PREPARE d(bigint) AS DELETE FROM public.bench_orders WHERE id=$1",
)

_STEADY = "PREPARE s(bigint,int) AS UPDATE public.bench_orders SET qty=$2, updated_at=clock_timestamp() WHERE id=$1"


@dataclass(frozen=True, slots=True)
class Churned:
    """What `churn` did."""

    changes: int
    transactions: int
    inserts: int
    updates: int
    deletes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Steady:
    """What `steady` did; `lateness` is the longest delay behind its schedule."""

    transactions: int
    seconds: float
    lateness: float


def load(dsn: str, rows: int) -> int:
    """Create the table and its rows; returns their number."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_SCHEMA.read_text().encode())
        stamp = "timestamptz '2024-01-01 00:00:00+00' + g*interval '1.001001 second'"
        statement = f"INSERT INTO public.bench_orders SELECT g, {_VALUES.format(stamp=stamp)}"
        connection.execute(f"{statement} FROM generate_series(1,{int(rows)}::bigint) g".encode())
        connection.execute("VACUUM (ANALYZE) public.bench_orders")
        connection.execute("CHECKPOINT")
    return rows


def churn(dsn: str, changes: int, rows: int, per_transaction: int = 50) -> Churned:
    """Make exactly so many changes. synchronous_commit is off for this session: it only fills the WAL."""
    begun = time.monotonic()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET synchronous_commit=off")
        for statement in _PREPARED:
            connection.execute(statement.encode())
        found = connection.execute("select coalesce(max(id), %s) from public.bench_orders", (rows,)).fetchone()
        plan = _Plan(random.Random(7), rows, int(found[0]) + 1 if found else rows + 1)
        transactions = 0
        while plan.done < changes:
            statements = plan.transaction(min(per_transaction, changes - plan.done))
            connection.execute(("BEGIN;" + ";".join(statements) + ";COMMIT").encode())
            transactions += 1
    seconds = time.monotonic() - begun
    return Churned(plan.done, transactions, plan.count["c"], plan.count["u"], plan.count["d"], seconds)


class _Plan:
    def __init__(self, rng: random.Random, rows: int, first: int) -> None:
        self._rng = rng
        self._rows = rows
        self._next = first
        self._mine: list[int] = []
        self.done = 0
        self.count = {"c": 0, "u": 0, "d": 0}

    def transaction(self, size: int) -> list[str]:
        fresh: list[int] = []
        statements = [self._statement(fresh) for _ in range(size)]
        self._mine += fresh
        self.done += size
        return statements

    def _statement(self, fresh: list[int]) -> str:
        chance = self._rng.random()
        if chance < 0.4 or (chance >= 0.8 and not self._mine):
            self.count["c"] += 1
            fresh.append(self._next)
            self._next += 1
            return f"EXECUTE i({fresh[-1]})"
        if chance < 0.8:
            self.count["u"] += 1
            return f"EXECUTE u({self._rng.randint(1, self._rows)},{self._rng.randint(0, 999)})"
        self.count["d"] += 1
        index = self._rng.randrange(len(self._mine))
        self._mine[index], self._mine[-1] = self._mine[-1], self._mine[index]
        return f"EXECUTE d({self._mine.pop()})"


def steady(dsn: str, tps: float, seconds: float, rows: int, connections: int = 8) -> Steady:
    """Commit so many one-row transactions per second, evenly, with synchronous_commit on."""
    start = time.time() + 0.5
    done: list[tuple[int, float, float]] = []

    def work(number: int) -> None:
        rng = random.Random(11 + number)
        total, rate, late = int(tps * seconds) // connections, tps / connections, 0.0
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(_STEADY)
            for count in range(total):
                due = start + (count + number / connections) / rate
                if (left := due - time.time()) > 0:
                    time.sleep(left)
                late = max(late, -left)
                connection.execute(f"EXECUTE s({rng.randint(1, rows)},{count % 1000})".encode())
        done.append((total, late, time.time()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Steady(
        sum(total for total, _, _ in done), max(at for _, _, at in done) - start, max(late for _, late, _ in done)
    )


def main() -> None:
    """One JSON line with what was done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=("load", "churn", "steady"))
    parser.add_argument("--dsn", required=True)
    for name, kind, default in (
        ("rows", int, 1_000_000),
        ("changes", int, 500_000),
        ("tps", float, 500.0),
        ("seconds", float, 60.0),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    given = parser.parse_args()
    works: dict[str, Callable[[], object]] = {
        "load": lambda: {"rows": load(given.dsn, given.rows)},
        "churn": lambda: asdict(churn(given.dsn, given.changes, given.rows)),
        "steady": lambda: asdict(steady(given.dsn, given.tps, given.seconds, given.rows)),
    }
    print(json.dumps(works[given.work]()))


if __name__ == "__main__":
    main()
