"""Whether a total is ever wrong: transfers between accounts, and `sum(balance)` of all accounts.

    python -m bench.views.consistency        (TRANSACTIONS, CONTENDERS, OUT from the environment)

Twenty accounts, eight sessions; a transaction takes an amount from one account and adds it to another, so the total is
the same after every transaction. The view is computed by Millrace from the segment log, and by the query that the
documentation of Structured Streaming leads to, from topics of the same changes with Debezium's envelope. Each counts
the totals that it emits, and those that no state of the source ever had. Millrace also has a view that changes with
every transfer, the totals of even and odd accounts, which is compared with the accounts at each emitted version.
"""

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from bench import cpu_meter
from bench.comparison import RESULTS, machine, write
from bench.sinks.pipeline import SinkEnvironment
from bench.views.place import ViewPipeline, view_environment
from cdc.model import TableId
from cdc.ports import LogReader

ACCOUNTS, BALANCE, SESSIONS = 20, 1_000, 8
TABLE = "public.accounts"
OFFSETS_PER_TRIGGER = 1_000
"""A limit as people set it; batches of topics end wherever it says."""
_SCHEMA = (
    f"create table {TABLE} (id bigint primary key, balance bigint not null)",
    f"alter table {TABLE} replica identity full",  # the query with differences needs the old balance
    f"insert into {TABLE} select g, {BALANCE} from generate_series(1, {ACCOUNTS}) g",
)
VIEWS: Sequence[Mapping[str, Any]] = (
    {
        "name": "total_balance",
        "kind": "query",
        "sql": f"select sum(balance) as total, count(*) as accounts from {TABLE}",
    },
    {
        "name": "half_balances",
        "kind": "query",
        "sql": f"select id % 2 as half, sum(balance) as total, count(*) as accounts from {TABLE} group by id % 2",
    },
)
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reader of the emitted results has seen; `lowest` and `highest` are totals."""

    emitted: int
    wrong: int
    lowest: int
    highest: int


def transfers(dsn: str, transactions: int) -> None:
    """So many transfers in all sessions together. The account with the smaller number comes first: no deadlocks."""

    def work(number: int) -> None:
        rng = random.Random(number)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("set synchronous_commit = off")
            for _ in range(transactions // SESSIONS):
                connection.execute(_transfer(rng).encode())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(SESSIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _transfer(rng: random.Random) -> str:
    first, second = sorted(rng.sample(range(1, ACCOUNTS + 1), 2))
    amount = rng.choice([-1, 1]) * rng.randint(1, 100)
    update = f"update {TABLE} set balance = balance"
    return f"begin; {update} - {amount} where id = {first}; {update} + {amount} where id = {second}; commit"


# -- what was emitted


def verdict(totals: Sequence[tuple[int, int]]) -> Verdict:
    """Of pairs of total and number of accounts."""
    right = (ACCOUNTS * BALANCE, ACCOUNTS)
    sums = [total for total, _ in totals]
    return Verdict(len(totals), sum(pair != right for pair in totals), min(sums, default=0), max(sums, default=0))


def emitted_rows(log: LogReader, table: TableId) -> Iterator[tuple[int, str, str, str | None]]:
    """The changes of a view in log order: commit LSN, op, key, row."""
    for piece in log.read(log.start()):
        rows = piece.rows.filter(pc.equal(piece.rows["table"], pa.scalar(str(table))))
        columns = (rows[name].to_pylist() for name in ("commit_lsn", "op", "key", "after"))
        yield from zip(*columns, strict=True)


def total_balance(log: LogReader) -> Verdict:
    """Of every emitted row of the view `total_balance`."""
    found = []
    for _, op, _, after in emitted_rows(log, TableId("view", "total_balance")):
        row = json.loads(after) if after and op != "d" else {"total": 0, "accounts": 0}
        found.append((int(row["total"]), int(row["accounts"])))
    return verdict(found)


def half_balances(log: LogReader) -> Verdict:
    """Of every commit for which the view `half_balances` has rows: wrong if its rows are not those of the accounts."""
    expected = accounts_by_commit(log)
    halves: dict[str, dict[str, Any]] = {}
    by_commit: dict[int, dict[int, int]] = {}
    for commit, op, key, after in emitted_rows(log, TableId("view", "half_balances")):
        if op == "d" or after is None:
            halves.pop(key, None)
        else:
            halves[key] = json.loads(after)
        by_commit[commit] = {int(row["half"]): int(row["total"]) for row in halves.values()}
    sums = [sum(each.values()) for each in by_commit.values()]
    wrong = sum(expected.get(commit) != found for commit, found in by_commit.items())
    return Verdict(len(by_commit), wrong, min(sums, default=0), max(sums, default=0))


def accounts_by_commit(log: LogReader) -> dict[int, dict[int, int]]:
    """The totals of even and odd accounts after each commit, from the accounts' own changes."""
    balances: dict[int, int] = {}
    found: dict[int, dict[int, int]] = {}
    for commit, op, key, after in emitted_rows(log, TableId.parse(TABLE)):
        if op == "d" or after is None:
            balances.pop(int(json.loads(key)["id"]), None)
        else:
            row = json.loads(after)
            balances[int(row["id"])] = int(row["balance"])
        totals: dict[int, int] = {}
        for account, balance in balances.items():
            totals[account % 2] = totals.get(account % 2, 0) + balance
        found[commit] = totals
    return found


# -- the two contenders


def millrace(environment: SinkEnvironment, transactions: int) -> Figures:
    """Both views, computed while the transfers go on."""
    pipeline = ViewPipeline(environment, "segments", environment.home / "segments", tables=(TABLE,), views=VIEWS)
    pipeline.start("capture")
    try:
        loaded = pipeline.captured()
        views = pipeline.start("views")
        cpu_meter.wait(lambda: views.alive() and pipeline.computed(loaded), "the first rows of the views", 300, 0.2)
        transfers(environment.database.dsn, transactions)
        target, log = pipeline.captured(), pipeline.log()
        cpu_meter.wait(lambda: views.alive() and pipeline.computed(target), "the views", 1800, 0.2)
        verdicts = {"total_balance": total_balance(log), "half_balances": half_balances(log)}
    finally:
        pipeline.end()
    if not all(each.emitted for each in verdicts.values()):
        raise RuntimeError("a view emitted nothing")
    return {name: asdict(each) for name, each in verdicts.items()}


def textbook(environment: SinkEnvironment, transactions: int) -> Figures:
    """Both ways to write the query, over topics that were filled beforehand."""
    pipeline = ViewPipeline(environment, "kafka", environment.home / "kafka", tables=(TABLE,))
    pipeline.start("capture")
    try:
        pipeline.captured()  # transfers before the snapshot would be rows, not changes
        transfers(environment.database.dsn, transactions)
        pipeline.captured()
    finally:
        pipeline.end()
    topic = {"bootstrap": environment.servers["kafka"].address, "topic": pipeline.topics[TABLE]}
    found = {}
    for query in ("last_balances", "differences"):
        settings = {**topic, "query": query, "limit": OFFSETS_PER_TRIGGER}
        command = [sys.executable, "-m", "bench.views.textbook_total", json.dumps(settings)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=3600)
        found[query] = asdict(verdict([tuple(pair) for pair in json.loads(done.stdout.splitlines()[-1])]))
        print(query, found[query], flush=True)
    return found


CONTENDERS = {"millrace": millrace, "textbook": textbook}


def measure(chosen: Sequence[str]) -> Figures:
    """The chosen contenders, each with accounts and transfers of its own."""
    transactions = int(os.environ.get("TRANSACTIONS", "100000")) // SESSIONS * SESSIONS
    found: Figures = {"transactions": transactions}
    with view_environment() as environment:
        for name in chosen:
            environment.database.execute(f"drop table if exists {TABLE}", *_SCHEMA)
            found[name] = CONTENDERS[name](environment, transactions)
    return found | violations(found)


def violations(found: Figures) -> Figures:
    """Wrong results: of all views of Millrace, and of the textbook's first query."""
    counted: Figures = {}
    if "millrace" in found:
        counted["millrace_violations"] = sum(each["wrong"] for each in found["millrace"].values())
    if "textbook" in found:
        counted["textbook_violations"] = found["textbook"]["last_balances"]["wrong"]
    return counted


def main() -> None:
    """Measure, and print and write the result."""
    wanted = os.environ.get("CONTENDERS", " ".join(CONTENDERS)).split()
    found = measure([name for name in CONTENDERS if name in wanted])
    print(json.dumps(found, indent=1))
    path = Path(os.environ.get("OUT") or RESULTS / "views.json")
    results: Figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write(path, {**results, "consistency": {**found, "machine": machine()}})


if __name__ == "__main__":
    main()
