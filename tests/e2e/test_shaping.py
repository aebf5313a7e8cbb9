"""Shaped tables in all three stores, through every process: filters, TOAST values, dead letters, a renamed column."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import yaml

from cdc.service.inspect.verification import differences
from cdc.service.state import status
from tests.fix_pipeline import Pipeline
from tests.fix_processes import Program, RunProgram, wait_until

pytestmark = pytest.mark.spark

SETUP = (
    "create table sales (id int primary key, status text, price numeric(12,2), quantity int, email text, note text)",
    "create table refunds (id int primary key, status text, price numeric(12,2), note text)",
    "alter table sales alter note set storage external",
    "insert into sales select g, (array['paid', 'draft'])[g % 2 + 1], g * 1.10, g, g || '@example.com',"
    " repeat('n', 5000) from generate_series(1, 40) g",
    "insert into refunds select g, 'paid', g, 'r' from generate_series(1, 10) g",
)
ORDERS = {
    "where": "status <> 'draft'",
    "rename": {"id": "number"},
    "drop": ["quantity"],
    "cast": {"price": "double precision"},
    "compute": {"total": "price * quantity", "letters": "length(note)", "share": "100 / quantity"},
    "mask": {"email": "hash"},
    "target": "sold",
}
REFUNDS = {"rename": {"id": "number"}, "cast": {"price": "double precision"}}


@pytest.fixture
def shaped(pipeline: Pipeline) -> Iterator[Pipeline]:
    """The same shape in every store; in OpenSearch both tables share an index."""
    pipeline.database.execute(*SETUP)
    facts = yaml.safe_load(pipeline.config.read_text())
    facts["source"]["tables"] = ["public.sales", "public.refunds"]
    for sink in facts["sinks"]:
        refunds = {**REFUNDS, "target": "sold"} if sink["kind"] == "opensearch" else REFUNDS
        sink.update(mask_key="k", shape={"public.sales": ORDERS, "public.refunds": refunds})
    pipeline.config.write_text(yaml.safe_dump(facts))
    pipeline.reopen()
    yield pipeline


def assert_equal(pipeline: Pipeline) -> None:
    found = list(differences(pipeline.settings, (), (), 60))
    assert [item.facts() for item in found if not item.equal] == []
    assert len(found) == 6


def state_of(pipeline: Pipeline, sink: str) -> dict[str, Any]:
    sinks: Any = status.read(pipeline.settings.state, "apply").get("sinks") or {}
    return dict(sinks.get(sink, {}))


def _restarts_after_now(pipeline: Pipeline) -> bool:
    """Whether rows that are read now are newer than all that is stored."""
    with pipeline.database.connect() as connection:
        connection.execute("checkpoint")
        found = connection.execute(
            "select restart_lsn > (select max(lsn) from changed) from pg_replication_slots where slot_name = %s",
            (pipeline.settings.source.slot,),
        ).fetchone()
    return bool(found and found[0])


def test_shaped_tables_follow_their_source_and_a_renamed_column_stops_one_table_only(
    shaped: Pipeline, redis_url: str, run_program: RunProgram
) -> None:
    def millrace(*words: str, code: int = 0) -> Program:
        program = run_program("-m", "cdc.cli.main", *words, "--config", str(shaped.config))
        assert program.wait(120) == code, program.said()
        return program

    daemon = shaped.start()
    shaped.settle()
    assert_equal(shaped)
    store = redis.Redis.from_url(redis_url, decode_responses=True)
    assert json.loads(store.get("sold:2") or "{}") == {
        "number": 2, "status": "paid", "price": 2.2, "email": json.loads(store.get("sold:2") or "{}")["email"],
        "note": "n" * 5000, "total": 4.4, "letters": 5000, "share": 50,
    }  # fmt: skip
    assert store.get("sold:1") is None
    shaped.database.execute(
        "update sales set status = 'paid' where id in (1, 3)",  # enters: its note was not sent
        "update sales set status = 'draft' where id in (2, 4)",  # leaves
        "update sales set quantity = 9 where id = 6",  # stays: the store keeps its note, and the length of it
        "update sales set note = repeat('m', 6000) where id = 8",
        "delete from sales where id = 10",
        "update refunds set price = 3.50 where id = 1",
    )
    shaped.settle()
    assert_equal(shaped)
    assert len(json.loads(store.get("sold:1") or "{}")["note"]) == 5000
    assert (store.get("sold:2"), json.loads(store.get("sold:6") or "{}")["letters"]) == (None, 5000)

    shaped.database.execute("update sales set quantity = 0 where id = 12", "update sales set price = 1 where id = 14")
    shaped.settle()
    sinks = ("delta", "opensearch", "redis")
    wait_until(lambda: [state_of(shaped, name).get("dead_letters") for name in sinks] == [1, 1, 1], 60)
    said = millrace("dlq", "list").said()
    assert "compute.share: division by zero" in said.replace("\n", " ")
    shaped.database.execute("update sales set quantity = 5 where id = 12")
    shaped.settle()
    wait_until(lambda: state_of(shaped, "redis").get("dead_letters") == 0, 60)
    assert_equal(shaped)
    assert "there" in millrace("why", "public.sales", '{"id":12}').said()

    shaped.database.execute("truncate refunds")
    shaped.settle()
    assert_equal(shaped)
    shaped.database.execute("insert into refunds values (1, 'paid', 1, 'again')")

    shaped.database.execute(
        "alter table sales rename quantity to pieces",
        "update sales set pieces = 7 where id = 16",
        "update refunds set price = 9 where id = 1",
    )
    wait_until(lambda: all("public.sales" in str(state_of(shaped, name)) for name in sinks), 120)
    wait_until(lambda: "unknown column 'quantity'" in str(state_of(shaped, "redis")), 60)
    wait_until(lambda: json.loads(store.get("public.refunds:1") or "{}").get("price") == 9, 60)
    assert "unknown column 'quantity'" in millrace("doctor", "--json", code=1).said()
    assert "unknown column 'quantity'" in millrace("validate", code=2).said().replace("\n", " ")
    facts = yaml.safe_load(shaped.config.read_text())
    for sink in facts["sinks"]:
        orders = sink["shape"]["public.sales"]
        orders["drop"] = ["pieces"]
        orders["compute"].update(total="price * pieces", share="100 / pieces")
    shaped.config.write_text(yaml.safe_dump(facts))
    shaped.reopen()
    millrace("validate")
    millrace("reload")
    shaped.settle()
    assert_equal(shaped)

    shaped.database.execute("create table changed as select pg_current_wal_lsn() as lsn")
    for sink in facts["sinks"]:
        sink["shape"]["public.sales"]["where"] = "status <> 'draft' and pieces > 20"
    shaped.config.write_text(yaml.safe_dump(facts))
    shaped.reopen()
    millrace("reload")
    wait_until(lambda: _restarts_after_now(shaped), 120, "a backfill replaces every row that is stored")
    millrace("backfill", "public.sales")
    wait_until(lambda: store.get("sold:8") is None, 120)
    shaped.settle()
    assert_equal(shaped)
    assert daemon.terminate(60) == 0
