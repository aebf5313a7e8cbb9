"""Views from Postgres to Redis: through kills, changed definitions and new views, the store agrees with the source."""

import json
import os
import random
import shutil
import signal
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis
import yaml

import cdc.log
from cdc.config.settings import Settings
from cdc.errors import LogLost
from cdc.log.segments.log import SegmentWriter
from cdc.service.daemon.process import settings_from
from cdc.service.state import status
from cdc.service.views.catalog import current_catalog
from deploy.local import ports
from tests.fix_processes import Program, RunProgram, wait_until
from tests.fix_servers import Database
from views import registry
from views.catalog import Catalog

pytestmark = pytest.mark.spark

TABLES = {
    "customers": "create table customers (id int primary key, name text)",
    "orders": "create table orders (id int primary key, customer_id int references customers, status text, note text)",
    "items": "create table items (order_id int references orders, number int, price numeric(12,2),"
    " primary key (order_id, number))",
}
DOCUMENTS: Mapping[str, Any] = {
    "kind": "documents",
    "name": "order_documents",
    "root": "public.orders",
    "include": [
        {"table": "public.items", "columns": ["number", "price"]},
        {"table": "public.customers", "name": "buyer"},
    ],
}
TOTALS: Mapping[str, Any] = {
    "kind": "query",
    "name": "totals",
    "sql": "select o.customer_id, sum(i.price) as total, count(*) as n from orders o"
    " join items i on i.order_id = o.id where o.status <> 'new' group by o.customer_id",
}
LATER: Mapping[str, Any] = {"kind": "query", "name": "later", "sql": "select id, name from customers where id > 3"}


class Shop:
    """A pipeline of three tables and some views into Redis."""

    def __init__(self, database: Database, url: str, state: Path, folder: Path, run_program: RunProgram) -> None:
        self.database, self.state, self.config = database, state, folder / "millrace.yaml"
        self.client = redis.Redis.from_url(url, decode_responses=True)
        self.url, self._run, self._port = url, run_program, ports.pick()
        self.rng = random.Random(11)

    def write(self, *views: Mapping[str, Any]) -> None:
        """The pipeline file."""
        source = {
            "host": self.database.server.host,
            "port": self.database.server.port,
            "database": self.database.name,
            "user": "postgres",
            "password": self.database.server.password,
            "slot": self.database.name,
            "tables": [f"public.{name}" for name in TABLES],
            "heartbeat_seconds": 1,
        }
        facts: dict[str, object] = {"state": str(self.state), "source": source, "http": {"port": self._port}}
        facts |= {"sinks": [{"kind": "redis", "url": self.url}], "views": [dict(view) for view in views]}
        self.config.write_text(yaml.safe_dump(facts), encoding="utf-8")

    def start(self, fail: str = "") -> Program:
        """Start the daemon, with fail points for its children."""
        env = {"MILLRACE_FAIL": fail} if fail else {}
        return self._run("-m", "cdc.cli.main", "run", "--config", str(self.config), env=env)

    def kill(self, part: str) -> None:
        """kill -9; the daemon starts it again."""
        with suppress(KeyError, ProcessLookupError):
            os.kill(int(str(status.read(self.state, part)["pid"])), signal.SIGKILL)

    def change(self, transactions: int) -> None:
        """Random transactions: new, changed and deleted rows, other keys, and now and then a truncate."""
        with self.database.connect() as connection:
            for _ in range(transactions):
                with connection.transaction():
                    for _ in range(self.rng.randint(1, 4)):
                        connection.execute(self._statement())

    def _statement(self) -> Any:
        number, other = self.rng.randint(1, 8), self.rng.randint(1, 8)
        upsert = "on conflict (id) do update set"
        made = [
            f"insert into customers values ({number}, 'Ü\"{other}') {upsert} name = excluded.name",
            f"insert into orders select {number}, (select max(id) from customers where id <= {other}), 'new',"
            f" repeat('x', 9000) {upsert} customer_id = excluded.customer_id",
            f"update orders set status = (array['new', 'paid', null])[{1 + number % 3}] where id = {other}",
            f"insert into items select {number}, {other}, {number}.{other}0"
            f" where exists (select from orders where id = {number}) on conflict do nothing",
            f"update items set price = price + 1, number = number + 10 where order_id = {number} and number = {other}",
            f"delete from items where order_id = {number} and number > {other}",
            f"delete from orders o where id = {number} and not exists (select from items where order_id = o.id)",
        ]
        return "truncate items" if self.rng.random() < 0.01 else self.rng.choice(made)

    def stored(self, view: str) -> dict[str, object]:
        """The rows of a view in the store."""
        names = sorted(self.client.scan_iter(f"view.{view}:*", 1000))
        return {name: json.loads(str(self.client.get(name))) for name in names}

    def expected(self, view: str) -> dict[str, object]:
        """What the referee computes from the source's rows."""
        settings = settings_from(self.config)
        declared = next(each for each in settings.views if each.name == view)
        catalog = wait_until(lambda: self._catalog(settings), 60, "the tables in the log")
        assert catalog is not None
        plan = registry.plan_of(declared, catalog)
        with self.database.connect() as connection:
            tables = {}
            for table, columns in plan.columns.items():
                names = ", ".join(f"to_json({name})::text" for name in columns)
                key = "row_to_json(row(ctid))::text"
                rows = connection.execute(f"select {key}, {names} from {table}").fetchall()
                cells = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(len(columns) + 1)]
                arrays = [pa.array(column, pa.string()) for column in cells]
                tables[table] = pa.table(arrays, ["_id", *columns])
        assert plan.referee is not None
        found = [json.loads(str(row)) for row in plan.referee(tables).column("_json").to_pylist()]
        own = [column.name for column in plan.schema.key]
        return {f"view.{view}:{':'.join(_part(row[name]) for name in own)}": row for row in found}

    def _catalog(self, settings: Settings) -> Catalog | None:
        """The catalog, once capture has described every table."""
        with suppress(LogLost, FileNotFoundError):
            found = current_catalog(settings, cdc.log.open_reader(settings))
            return found if len(found.schemas) == len(TABLES) else None
        return None

    def trim(self) -> None:
        """Remove everything from the log, as retention does in the end. The pipeline must not run."""
        settings = settings_from(self.config)
        with closing(cdc.log.open_writer(settings)) as log:
            assert isinstance(log, SegmentWriter)
            assert log.trim(0.0, 0.0, force=True)
        assert cdc.log.open_reader(settings).removed()

    def settle(self, *views: str) -> None:
        """Wait until the store has what the source says, and name what differs."""
        for view in views:
            wanted = self.expected(view)
            try:
                wait_until(lambda: self.stored(view) == wanted, 30, f"view {view} in the store")  # noqa: B023
            except AssertionError as error:
                error.add_note(f"expected {wanted}\nstored {self.stored(view)}\n{status.read(self.state, 'views')}")
                raise


def _part(value: object) -> str:
    return "null" if value is None else str(value)


@pytest.fixture
def pipeline(database: Database, redis_url: str, state_dir: Path, tmp_path: Path, run_program: RunProgram) -> Shop:
    database.execute(*TABLES.values())
    found = Shop(database, redis_url, state_dir, tmp_path, run_program)
    found.change(60)
    return found


def test_the_store_has_the_views_of_the_source_after_kills_at_every_step(pipeline: Shop) -> None:
    pipeline.write(DOCUMENTS, TOTALS)
    points = (
        "views.after_step:kill@6",
        "views.after_put:kill@3",
        "views.after_checkpoint:kill",
        "views.after_append:kill@3",
    )
    daemon = pipeline.start(",".join(points))
    pipeline.settle("order_documents", "totals")
    for part in ("views", "capture", "views"):
        pipeline.change(40)
        pipeline.kill(part)
        pipeline.change(40)
    pipeline.settle("order_documents", "totals")
    for part in ("views", "capture"):
        assert daemon.said().count(f"{part} ended with -9") > 1, daemon.said()
    assert pipeline.stored("order_documents")
    assert daemon.terminate(60) == 0


def test_a_changed_view_is_replaced_and_a_new_one_is_filled_from_the_log(pipeline: Shop) -> None:
    pipeline.write(DOCUMENTS, TOTALS)
    daemon = pipeline.start()
    pipeline.settle("order_documents", "totals")
    paid = {**TOTALS, "sql": str(TOTALS["sql"]).replace("o.status <> 'new'", "o.status = 'paid' and o.customer_id > 4")}
    pipeline.write(DOCUMENTS, paid, LATER)
    daemon.send(signal.SIGHUP)
    pipeline.change(30)
    pipeline.settle("totals", "later", "order_documents")
    pipeline.database.execute("truncate items", "update customers set name = 'last' where id = 4")
    pipeline.settle("totals", "later", "order_documents")
    assert pipeline.stored("totals") == {}
    assert daemon.terminate(60) == 0


def test_a_view_is_filled_from_the_tables_where_the_log_has_lost_its_beginning(pipeline: Shop) -> None:
    pipeline.write(DOCUMENTS)
    daemon = pipeline.start()
    pipeline.settle("order_documents")
    assert daemon.terminate(60) == 0
    pipeline.trim()
    pipeline.database.execute("delete from items", "delete from orders where id < 4")
    shutil.rmtree(pipeline.state / "views" / "order_documents" / "state")
    pipeline.write(DOCUMENTS, TOTALS, LATER)
    daemon = pipeline.start()
    wait_until(lambda: (pipeline.state / "views" / "later" / "table-load.json").exists(), 60, "the tables are read")
    pipeline.kill("views")
    pipeline.settle("order_documents", "totals", "later")
    pipeline.change(30)
    pipeline.settle("order_documents", "totals", "later")
    assert daemon.terminate(60) == 0
