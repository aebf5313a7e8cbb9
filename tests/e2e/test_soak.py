"""The soak in its short form: a busy shop, every kind of process killed, and in the end every row compared."""

import pytest

from bench.soak.run import Soak
from deploy.local.servers import Servers
from tests.fix_servers import LocalServer, PostgresServer

pytestmark = pytest.mark.spark


_KINDS = ("kill apply", "kill daemon", "crash postgres", "kill redis")


@pytest.mark.parametrize(
    ("minutes", "kinds"),
    [(0.0, ("kill daemon", "crash postgres")), pytest.param(0.5, _KINDS, marks=pytest.mark.soak)],
    ids=["short", "long"],
)
def test_every_process_may_be_killed_at_random_and_nothing_differs_stays_or_grows(
    session_servers: Servers,
    postgres_server: PostgresServer,
    redis_server: LocalServer,
    opensearch_server: LocalServer,
    minutes: float,
    kinds: tuple[str, ...],
) -> None:
    """In CI the other processes are killed by tests/e2e/test_pipeline.py, and the customers are fewer."""
    soak = Soak(session_servers, minutes, seed=5, kinds=kinds, pause=0.03 if minutes else 0.5)
    result = soak.run()
    soak.clean_up()
    assert result["failures"] == []
    assert result["differences"] == []
    assert result["tables_compared"] == 18
    assert result["processes_left"] == 0
    assert result["transactions"] > 50
    assert {fault["kind"] for fault in result["injected"]} == set(kinds)
