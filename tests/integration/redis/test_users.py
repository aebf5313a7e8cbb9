"""deploy/redis/users.acl: Redis loads it, it allows every command of the sink, and nothing else."""

import hashlib
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from cdc.artifacts.account import account, set_owner, write_private_file
from cdc.config.secret import Secret
from cdc.model import Lsn
from sinks.context import SinkContext
from sinks.redis.settings import RedisSettings
from sinks.redis.sink import open_sink
from tests.contract.test_sinks import check
from tests.fix_processes import wait_until
from tests.fix_servers import LocalServer, MakeRedis
from tests.scenes.histories import INTEGERS, History, batch, change, cut, table

ACL = Path(__file__).parents[3] / "deploy" / "redis" / "users.acl"
PLACEHOLDER = "replace-with-sha256-of-the-password"
PASSWORD = "a-password-of-the-test"
ITEMS = table()
BY = {"public.items": ("label",)}
Guarded = Callable[..., LocalServer]


@pytest.fixture
def guarded(private_redis: MakeRedis, session_home: Path) -> Guarded:
    """A Redis under the shipped file, with a password in it; the test's own user is called `tester`."""

    def make(**settings: str) -> LocalServer:
        folder = Path(tempfile.mkdtemp(prefix="acl-", dir=session_home))
        set_owner(folder, account())
        own = "user tester on nopass ~* &* +@all\n"
        write_private_file(folder / "users.acl", own + "user default on nopass ~* &* +@all\n", account())
        server = private_redis({"aclfile": str(folder / "users.acl"), **settings})
        shipped = ACL.read_text(encoding="utf-8")
        assert shipped.count(PLACEHOLDER) == 1
        hashed = hashlib.sha256(PASSWORD.encode()).hexdigest()
        write_private_file(folder / "users.acl", own + shipped.replace(PLACEHOLDER, hashed), account())
        unrestricted(server).acl_load()
        return server

    return make


def unrestricted(server: LocalServer) -> redis.Redis:
    return redis.Redis(host=server.host, port=server.port, username="tester", password="any")


def opened(server: LocalServer, **more: Any) -> Any:
    own = {"url": server.url, "username": "millrace", "password": Secret(PASSWORD), "prefix": "millrace:"}
    sink = open_sink(RedisSettings(**{**own, **more}), SinkContext(Path("unused")))
    sink.prepare(ITEMS)
    return sink


MODES: dict[str, dict[str, Any]] = {
    "json": {},
    "hash": {"form": "hash", "ttl_seconds": 500},
    "lookups": {"lookups": BY, "channel": "millrace:changes"},
}


def run_history(sink: Any) -> None:
    history = History(ITEMS, INTEGERS, random.Random(4)).write(80)
    for rows in cut(history.rows, random.Random(4)):
        sink.apply(batch(ITEMS, rows))
    assert any(row["op"] == "t" for row in history.rows)
    check(sink, history.state())
    mark = sink.mark_table(ITEMS)
    sink.record_position(Lsn(5))
    assert sink.compare_marks({ITEMS.table: mark}, Lsn(5)) == {ITEMS.table: mark}
    sink.recreate(ITEMS)
    sink.prepare(ITEMS)
    check(sink, {})


@pytest.mark.parametrize("mode", sorted(MODES))
def test_the_sink_works_under_the_shipped_rules(guarded: Guarded, mode: str) -> None:
    sink = opened(guarded(), **MODES[mode])
    run_history(sink)
    assert sink.facts() == {"eviction policy": "noeviction"}


def test_invalidation_works_under_the_shipped_rules(guarded: Guarded) -> None:
    server = guarded()
    unrestricted(server).set("millrace:public.items:1", "filled")
    opened(server, mode="invalidate").apply(batch(ITEMS, [change("u", '{"id":1}', 10, '{"id":1}')]))
    assert not unrestricted(server).exists("millrace:public.items:1")


def test_a_cluster_works_under_the_shipped_rules(guarded: Guarded) -> None:
    server = guarded(**{"cluster-enabled": "yes"})
    node = unrestricted(server)
    node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)  # type: ignore[no-untyped-call]
    wait_until(lambda: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"), 30)  # type: ignore[no-untyped-call]
    run_history(opened(server, url=f"redis://{server.host}:{server.port}", cluster=True))


FORBIDDEN = [
    ("GET", "other:1"),
    ("SET", "other:1", "x"),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", "0"),
    ("KEYS", "*"),
    ("ACL", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("SHUTDOWN",),
    ("REPLICAOF", "NO", "ONE"),
    ("CLIENT", "LIST"),
    ("MONITOR",),
    ("PUBLISH", "other", "x"),
    ("SUBSCRIBE", "millrace:changes"),
    ("RENAME", "millrace:a", "millrace:b"),
    ("EVAL", "return redis.call('GET', 'other:1')", "0"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
]


def test_other_commands_and_keys_are_forbidden(guarded: Guarded) -> None:
    server = guarded()
    unrestricted(server).set("other:1", "not yours")
    client = redis.Redis(host=server.host, port=server.port, username="millrace", password=PASSWORD)
    for command in FORBIDDEN:
        with pytest.raises((NoPermissionError, ResponseError), match=r"(?i)no perm|ACL failure|can't run|can't access"):
            client.execute_command(*command)  # type: ignore[no-untyped-call]
    assert unrestricted(server).get("other:1") == b"not yours"


def test_a_password_is_required(guarded: Guarded) -> None:
    server = guarded()
    with pytest.raises(AuthenticationError):
        redis.Redis(host=server.host, port=server.port).ping()
    with pytest.raises(AuthenticationError):
        redis.Redis(host=server.host, port=server.port, username="millrace", password="wrong").ping()


def test_redis_refuses_the_file_until_the_placeholder_is_replaced(private_redis: MakeRedis) -> None:
    """A forgotten placeholder must not become a known password."""
    client = redis.Redis.from_url(private_redis().url)
    rules = next(line for line in ACL.read_text(encoding="utf-8").splitlines() if "millrace on" in line).split()[2:]
    with pytest.raises(ResponseError, match="Error in ACL SETUSER"):
        client.execute_command("ACL", "SETUSER", "millrace", *rules)  # type: ignore[no-untyped-call]
    assert os.fsencode("millrace") not in client.acl_users()
