"""The Kafka log while brokers, networks and writers die. The end is always the same: every change once, in order."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from cdc.errors import LogCorrupt
from cdc.log.kafka_reader import KafkaReader
from cdc.log.kafka_settings import KafkaSettings
from cdc.log.kafka_writer import KafkaWriter
from tests.fix_proxy import MakeProxy
from tests.fix_servers import LocalServer, MakeKafka
from tests.kafka_rows import batch, writer

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240)]
ROWS = 40


def appended_once(settings: KafkaSettings, lsns: range) -> None:
    """The log holds exactly these transactions, in order, and per key too."""
    reader = KafkaReader(settings)
    rows = [row for part in reader.read(reader.start()) for row in part.rows.to_pylist()]
    assert [(row["commit_lsn"], row["ordinal"]) for row in rows] == [(lsn, n) for lsn in lsns for n in range(ROWS)]
    assert reader.head()[1] == lsns[-1]


class Appending:
    """A writer at work in a thread of its own."""

    def __init__(self, log: KafkaWriter, lsns: range) -> None:
        self.done = 0
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(log, lsns))
        self._thread.start()

    def _run(self, log: KafkaWriter, lsns: range) -> None:
        try:
            for lsn in lsns:
                log.append(batch(lsn, ROWS))
                self.done = lsn
        except Exception as error:
            self.failure = error

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.failure is None, self.failure
            assert time.monotonic() < deadline, f"stuck at {self.done}"
            time.sleep(0.01)

    def finish(self, seconds: float = 120) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"stuck at {self.done}"
        assert self.failure is None, self.failure


def test_a_killed_broker_costs_no_change_and_repeats_none(
    private_kafka: MakeKafka, topic_prefix: str, tmp_path: Path
) -> None:
    server = private_kafka()
    settings = KafkaSettings(bootstrap=server.url, prefix=topic_prefix)
    work = Appending(writer(settings, tmp_path), range(10, 60))
    work.wait_for(lambda: work.done >= 20)
    server.kill()
    stood = work.done
    server.start()
    work.wait_for(lambda: work.done >= stood + 5)
    server.pause()
    time.sleep(3)  # long enough for requests to be waiting; nothing can be waited for while nothing answers
    server.unpause()
    work.finish()
    appended_once(settings, range(10, 60))


def test_resets_in_the_middle_of_requests_neither_repeat_nor_reorder(
    private_kafka: MakeKafka, proxy: MakeProxy, topic_prefix: str, tmp_path: Path
) -> None:
    front = proxy(1)
    server = private_kafka(advertised=front.port)
    front.target = server.port
    settings = KafkaSettings(bootstrap=f"127.0.0.1:{front.port}", prefix=topic_prefix)
    work = Appending(writer(settings, tmp_path), range(10, 70))
    for cut in range(6):
        reached = work.done
        work.wait_for(lambda reached=reached: work.done >= reached + 3)  # type: ignore[misc]
        front.cut_after(2000 + 3000 * cut, "up" if cut % 2 else "down")
    work.finish()
    appended_once(settings, range(10, 70))


def test_what_was_not_acknowledged_is_not_confirmed(
    private_kafka: MakeKafka, proxy: MakeProxy, topic_prefix: str, tmp_path: Path
) -> None:
    front = proxy(1)
    server = private_kafka(advertised=front.port)
    front.target = server.port
    settings = KafkaSettings(bootstrap=f"127.0.0.1:{front.port}", prefix=topic_prefix)
    log = writer(settings, tmp_path)
    log.append(batch(10, ROWS))
    front.one_way("up")  # the broker stores everything, and its acknowledgements never come
    sent = front.forwarded["up"]
    work = Appending(log, range(20, 21))
    work.wait_for(lambda: front.forwarded["up"] > sent)
    assert log.progress().end == 10
    direct = settings.model_copy(update={"bootstrap": server.url})
    front.pass_on()
    front.reset()
    work.finish()
    assert log.progress().end == 20
    appended_once(direct, range(10, 21, 10))


@pytest.mark.parametrize("point", ["log.before_write", "log.before_position", "log.before_commit", "log.after_append"])
def test_a_writer_killed_anywhere_goes_on_without_loss_or_repeat(
    kafka_server: LocalServer, topic_prefix: str, tmp_path: Path, point: str
) -> None:
    settings = KafkaSettings(bootstrap=kafka_server.url, prefix=topic_prefix)
    program = (
        "import sys\nfrom pathlib import Path\nfrom cdc.log.kafka_settings import KafkaSettings\n"
        "from tests.kafka_rows import batch, writer\n"
        "log = writer(KafkaSettings(bootstrap=sys.argv[1], prefix=sys.argv[2]), Path(sys.argv[3]))\n"
        "for lsn in range(max(10, log.progress().end + 1), 18):\n"
        f"    log.append(batch(lsn, {ROWS}))\n"
    )
    command = [sys.executable, "-c", program, settings.bootstrap, settings.prefix, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = subprocess.run(command, env={**environment, "MILLRACE_FAIL": f"{point}:kill@4"}, check=False, timeout=90)
    assert killed.returncode == -9
    again = subprocess.run(command, env=environment, check=False, timeout=90, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    appended_once(settings, range(10, 18))


def test_a_topic_deleted_under_the_writer_stops_it_with_a_reason(
    kafka_server: LocalServer, topic_prefix: str, tmp_path: Path
) -> None:
    settings = KafkaSettings(
        bootstrap=kafka_server.url,
        prefix=topic_prefix,
        client={"topic.metadata.propagation.max.ms": "1000", "topic.metadata.refresh.interval.ms": "1000"},
    )
    log = writer(settings, tmp_path)
    log.append(batch(10, ROWS))
    topic = f"{topic_prefix}.public.orders"
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    for future in admin.delete_topics([topic]).values():
        future.result()
    with pytest.raises(LogCorrupt, match="gone"):
        log.append(batch(20, ROWS))
    assert log.progress().end == 10
    with pytest.raises(LogCorrupt, match=f"Topic {topic} is gone"):
        writer(settings, tmp_path)
