"""The client's half of reading your own writes, against the endpoint itself."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import psycopg
import pytest

import cdc.log
from cdc.client import Freshness, Stale
from cdc.config.settings import Settings
from cdc.errors import ConfigError, Lost
from cdc.model import LOG_SCHEMA, Entry, Lsn, TableId, format_lsn, parse_lsn
from cdc.service.http.server import Server
from cdc.service.state import status
from cdc.service.state.sink_positions import consumer_name
from deploy.local import ports
from sinks.apply.dead_letters import DeadLetter, DeadLetters
from tests.fix_servers import Database


@pytest.fixture
def settings(settings_of: Callable[..., Settings]) -> Iterator[Settings]:
    source = {"tables": ["public.t", "public.u"]}
    settings = settings_of(
        source=source, sinks=[{"kind": "redis"}], http={"port": ports.pick(), "token": "open-sesame"}
    )
    append(settings, 500)
    with Server(settings):
        yield settings


def append(settings: Settings, end: int) -> None:
    """An entry in the log, which the store has."""
    writer = cdc.log.open_writer(settings)
    writer.append(Entry(LOG_SCHEMA.empty_table(), Lsn(end), {"reached": str(end)}))
    writer.close()
    cdc.log.open_reader(settings).commit("redis", Lsn(end))


def fresh(settings: Settings, *sinks: str, token: str = "open-sesame") -> Freshness:
    return Freshness(f"http://127.0.0.1:{settings.http.port}", *sinks, token=token)


def test_what_the_store_holds_is_waited_for_and_what_it_lacks_is_stale(settings: Settings) -> None:
    with fresh(settings, "redis") as client:
        client.wait(format_lsn(Lsn(500)))
        with pytest.raises(Stale, match=r"redis did not reach 0/1F5 in 0\.2 s"):
            client.wait(format_lsn(Lsn(501)), timeout=0.2)
        client.wait(format_lsn(Lsn(500)))


def test_what_the_answer_does_not_cover_is_at_hand(settings: Settings) -> None:
    said = {"message": "no key", "remedy": "give it one"}
    status.publish(settings.state, "apply", {"sinks": {"redis": {"tables_waiting": {"public.t": said}}}})
    now = datetime.now(UTC)
    letters = [DeadLetter("public.u", key, "u", "{}", (), 400, 400, now, 1, "too deep", now) for key in ("a", "b")]
    DeadLetters(settings.state / "dead-letters" / "redis").add(letters)
    cdc.log.open_reader(settings).commit(consumer_name("redis", TableId.parse("public.t")), Lsn(500))
    append(settings, 600)
    address, lsn = f"http://127.0.0.1:{settings.http.port}", format_lsn(Lsn(600))
    with fresh(settings, "redis") as client, pytest.raises(Stale, match=r"public\.t waits: no key"):
        client.wait(lsn, timeout=2)
    with Freshness(address, "redis", token="open-sesame", except_waiting=True) as client:
        client.wait(lsn)
        assert [item["message"] for item in client.excepted] == ["public.t waits: no key", "2 dead letters of public.u"]
    with Freshness(address, token="open-sesame", tables=["public.u"]) as client:
        client.wait(lsn)
        assert [item["kind"] for item in client.excepted] == ["dead letters"]


@pytest.mark.parametrize(("sink", "token", "said"), [("nobody", "open-sesame", "404"), ("redis", "wrong", "401")])
def test_a_refusal_says_why(settings: Settings, sink: str, token: str, said: str) -> None:
    with fresh(settings, sink, token=token) as client, pytest.raises(ConfigError, match=said):
        client.wait("0/1")


def test_a_daemon_that_is_not_there_is_named_as_such() -> None:
    with Freshness(f"http://127.0.0.1:{ports.pick()}") as client, pytest.raises(Lost, match="does not answer"):
        client.wait("0/1")


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http"):
        Freshness(url)


@pytest.mark.parametrize("commit", ["on", "off"])
def test_the_position_covers_the_commit_also_where_it_was_not_waited_for(database: Database, commit: str) -> None:
    with database.connect() as owner:
        owner.execute("create table t (id int)")
        before = parse_lsn(Freshness.position(owner))
        owner.execute(f"set synchronous_commit = {commit}")
        owner.execute("insert into t values (1)")
        after = parse_lsn(Freshness.position(owner))
        row = owner.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    assert before < after <= parse_lsn(row[0])


def test_a_connection_without_autocommit_is_left_outside_a_transaction(database: Database) -> None:
    with psycopg.connect(database.server.dsn(database.name)) as connection:
        connection.execute("create table t (id int)")
        with pytest.raises(ConfigError, match="inside a transaction"):
            Freshness.position(connection)
        connection.commit()
        Freshness.position(connection)
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
