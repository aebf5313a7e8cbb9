"""From a row in Postgres to all three stores, through every process, and through the death of every process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from deploy.demo.shop import Customers
from tests.fix_pipeline import Pipeline
from tests.fix_processes import wait_until
from tests.fix_servers import LocalServer, PostgresServer

pytestmark = pytest.mark.spark


@contextmanager
def customers_at_work(pipeline: Pipeline) -> Iterator[None]:
    """Somebody changes the shop every second, ten times at once; a lost connection is opened again.

    A change now and then would cost as much CPU as many: each wakes every process for a batch of its own.
    """
    stop = threading.Event()

    def work() -> None:
        seed = 0
        while not stop.is_set():
            seed += 1
            try:
                with pipeline.database.connect() as owner:
                    customers = Customers(owner, seed)
                    while not stop.wait(1):
                        for _ in range(10):
                            customers.act()
            except Exception:
                stop.wait(0.2)  # the server was killed: that is what the test does

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def test_every_process_may_be_killed_and_the_stores_end_equal(pipeline: Pipeline, redis_server: LocalServer) -> None:
    """In CI the daemon and Postgres are killed by tests/e2e/test_soak.py."""
    daemon = pipeline.start()
    pipeline.settle()
    with customers_at_work(pipeline):
        pipeline.kill("capture")
        pipeline.settle()
        pipeline.kill("apply")
        redis_server.kill()
        redis_server.start()
        pipeline.settle()
    pipeline.settle()
    pipeline.assert_equal()
    assert daemon.terminate(60) == 0


@pytest.mark.soak
def test_processes_killed_one_after_another_leave_the_stores_equal(
    pipeline: Pipeline, postgres_server: PostgresServer, redis_server: LocalServer
) -> None:
    daemon = pipeline.start()
    pipeline.settle()
    with customers_at_work(pipeline):
        pipeline.kill("capture")
        pipeline.settle()
        pipeline.kill("apply")
        pipeline.settle()
        redis_server.kill()
        redis_server.start()
        postgres_server.stop("immediate")
        postgres_server.start()
        pipeline.settle()
        daemon.send(signal.SIGKILL)
        daemon.wait()
        daemon = pipeline.start()
        pipeline.settle()
    pipeline.settle()
    pipeline.assert_equal()
    assert daemon.terminate(60) == 0


def test_stores_that_were_down_at_the_start_come_when_they_can_and_every_change_arrives_in_all_three(
    pipeline: Pipeline, postgres_server: PostgresServer, redis_server: LocalServer, opensearch_server: LocalServer
) -> None:
    for server in (postgres_server, redis_server, opensearch_server):
        server.stop()
    daemon = pipeline.start()
    address = f"http://127.0.0.1:{pipeline.settings.http.port}"

    def reasons() -> str:
        try:
            return httpx.get(f"{address}/readyz", trust_env=False, verify=False).text
        except httpx.HTTPError:
            return ""

    for part in ("capture", "sink redis", "sink opensearch"):
        wait_until(lambda: f'"{part}"' in reasons(), 120, f"{part} among the reasons")  # noqa: B023
    assert daemon.running()
    assert httpx.get(f"{address}/livez", trust_env=False).status_code == 200
    postgres_server.start()
    wait_until(lambda: '"capture"' not in reasons(), 120, "capture at work without the other stores")
    redis_server.start()
    wait_until(lambda: '"sink redis"' not in reasons(), 120, "Redis at work without the search")
    assert '"sink opensearch"' in reasons()
    opensearch_server.start()
    pipeline.settle()
    pipeline.assert_equal()
    with pipeline.database.connect() as owner:
        customers = Customers(owner)
        for _ in range(300):
            customers.act()
        owner.execute("update users set name = name || '!' where id % 3 = 0")
        owner.execute("delete from page_views where user_id % 2 = 0")
        owner.execute("truncate logins")
    pipeline.settle()
    pipeline.assert_equal()
    wait_until(lambda: httpx.get(f"{address}/readyz", trust_env=False).status_code == 200, 30)
    assert daemon.terminate(60) == 0
