"""Reads given ranges of partitions, all of them and nothing else, and turns them into rows.

A range that the broker no longer has is an error, never a jump: `auto.offset.reset` is `error` and the first kept
offset is compared before reading.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
from confluent_kafka import Consumer

from cdc.errors import LogCorrupt, LogError, LogLost
from cdc.log.kafka.client import CALL_SECONDS, Cluster, in_our_words, speaking, watermarks
from cdc.log.kafka.envelope.decode import Decoded, decode
from cdc.log.kafka.read.feed import Address, Decode, Feed, OffsetRange, RangeRows, Record, RefusedByBroker

__all__ = ["Decode", "OffsetRange", "RangeReader", "RangeRows", "envelopes"]

_SILENCE_SECONDS = 30.0
_MANY = 10_000
"""Messages of a read behind which another is likely to follow at once: a reader that catches up."""
_AHEAD_MESSAGES, _AHEAD_BYTES = 60_000, 64 << 20
"""How far it is run ahead: about the next batch of such a reader, and what a worker can hold twice."""


def envelopes(records: Sequence[Record]) -> Decoded:
    """Records that our own writer made."""
    keys = pa.array([key for _, key, _ in records], pa.binary())
    return decode(keys, pa.array([value for _, _, value in records], pa.binary()))


class RangeReader:
    """Keeps its connection from one call to the next: making one costs more than reading a small batch.

    With `ahead` it goes on between the calls of a reader that catches up: what comes next is fetched and decoded while
    the caller is busy with what it was given. Nothing is given that was not asked for.
    """

    def __init__(self, cluster: Cluster, decoded: Decode = envelopes, *, ahead: bool = False) -> None:
        self._cluster = cluster
        self._decoded = decoded
        self._ahead = ahead
        self._consumer: Consumer | None = None
        self._introduced: set[str] = set()
        self._feed: Feed | None = None
        self._runner: threading.Thread | None = None
        self._halt = threading.Event()

    def read(self, ranges: Iterable[OffsetRange]) -> list[RangeRows]:
        """Each range that has rows, in the order of the ranges."""
        wanted = [item for item in ranges if item.start is None or item.start < item.end]
        self._rest()
        try:
            found = self._read(wanted) if wanted else []
        except BaseException:
            self.close()
            raise
        return [part for part in found if part.rows.num_rows]

    def close(self) -> None:
        """Let go of the connection; the next read makes a new one."""
        self._rest()
        self._feed = None
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
            self._introduced.clear()

    def _read(self, wanted: Sequence[OffsetRange]) -> list[RangeRows]:
        if self._consumer is None:
            # An empty fetch is answered after this long: it bounds how late the end of a range is noticed.
            self._consumer = self._cluster.consumer(**{"fetch.wait.max.ms": 20, "fetch.error.backoff.ms": 20})
        self._introduce(self._consumer, {item.topic for item in wanted})
        feed = self._feed
        again = feed is not None and feed.continues({item.address: item.start for item in wanted})
        if feed is None or not again:
            starts = {item.address: _start(self._consumer, item) for item in wanted}
            wanted = [item for item in wanted if starts[item.address] < item.end]
            starts = {item.address: starts[item.address] for item in wanted}
            self._feed = feed = Feed(self._consumer, starts, self._decoded, self._cluster.settings.foreign)
            if not wanted:
                return []
        _await(feed, self._consumer, wanted)
        found = [feed.take(item) for item in wanted]
        self._go_on(feed, again, sum(item.end - (item.start or 0) for item in wanted))
        return found

    def _introduce(self, consumer: Consumer, topics: set[str]) -> None:
        """A consumer that does not know where a topic is looks for it once a second only."""
        for topic in topics - self._introduced:
            with speaking(f"asking for the leaders of {topic}"):
                consumer.list_topics(topic, CALL_SECONDS)
            self._introduced.add(topic)

    # -- between two reads

    def _go_on(self, feed: Feed, again: bool, messages: int) -> None:
        """Stay assigned, and run ahead once a read went on where the one before had ended: the next may as well."""
        if not self._ahead or messages < _MANY:
            self._feed = None
            if self._consumer is not None:
                self._consumer.unassign()
        elif again:
            self._halt.clear()
            self._runner = threading.Thread(target=self._run, args=(feed,), name="kafka-ahead", daemon=True)
            self._runner.start()

    def _run(self, feed: Feed) -> None:
        left = _AHEAD_BYTES
        feed.weighed()
        try:
            while not self._halt.is_set() and left > 0 and feed.ahead < _AHEAD_MESSAGES and feed.pump(0.05):
                left -= feed.weighed()
                feed.decode()
        except (LogError, RefusedByBroker):
            self._feed = None  # whoever asks for it meets it again, and says what is wrong

    def _rest(self) -> None:
        if self._runner is not None:
            self._halt.set()
            self._runner.join()
            self._runner = None


def _start(consumer: Consumer, item: OffsetRange) -> int:
    return watermarks(consumer, item.topic, item.partition)[0] if item.start is None else item.start


def _await(feed: Feed, consumer: Consumer, wanted: Sequence[OffsetRange]) -> None:
    """Until everything wanted was delivered."""
    places: Mapping[Address, OffsetRange] = {item.address: item for item in wanted}
    quiet_until = time.monotonic() + _SILENCE_SECONDS
    while not feed.covers(wanted):
        try:
            came = feed.pump(0.2)
        except RefusedByBroker as refused:
            _refuse_lost(places[refused.address], consumer)
            topic, partition = refused.address
            raise in_our_words(refused.error, f"reading {topic}-{partition}") from None
        if came:
            quiet_until = time.monotonic() + _SILENCE_SECONDS
        elif time.monotonic() > quiet_until:
            for item in wanted:
                _refuse_lost(item, consumer)
            raise LogLost("Kafka delivered nothing for half a minute.", "Look at the brokers.")


def _refuse_lost(item: OffsetRange, consumer: Consumer) -> None:
    """Say what is missing, if something is."""
    place = f"{item.topic}-{item.partition}"
    low, high = watermarks(consumer, item.topic, item.partition)
    if item.start is not None and item.start < low:
        raise LogCorrupt(
            f"Retention removed offsets {item.start} to {low - 1} of {place} before they were read.",
            "Start the reader anew from a snapshot (millrace resync), and raise log.retention_hours.",
        )
    if item.end > high:
        raise LogCorrupt(
            f"{place} ends at offset {high}, but the log's position says {item.end}: messages are gone.",
            "The topic was deleted, made again or restored from an older copy: start with a new prefix and snapshot.",
        )
