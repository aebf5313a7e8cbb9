"""Offset ranges between two positions, and a reader that returns exactly their rows.

If the broker no longer has a range, the reader raises an error and never skips: `auto.offset.reset` is `error`, and the
first retained offset is checked.
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace

import pyarrow as pa
from confluent_kafka import Consumer

from cdc.errors import ChangesRemoved, LogCorrupt, LogError, LogLost
from cdc.log.kafka.admin import Topic
from cdc.log.kafka.client import CALL_SECONDS, Cluster, translate_error, translating_errors, watermarks
from cdc.log.kafka.envelope.decode import Decoded, decode
from cdc.log.kafka.position import KafkaPosition, TopicExtent
from cdc.log.kafka.read.feed import Address, Decode, Feed, OffsetRange, RangeRows, Record, RefusedByBroker
from cdc.log.kafka.topics import require_unchanged
from cdc.ports import Share

__all__ = ["Decode", "OffsetRange", "RangeReader", "RangeRows", "decode_envelopes"]

_SILENCE_SECONDS = 30.0
_SHARE_MESSAGES = 50_000
"""Messages of a share read at once: a large transaction has many more."""
_PREFETCH_FROM = 10_000
"""Reads of at least so many messages come from a reader that catches up: the next read is likely to follow at once."""
_PREFETCH_MESSAGES, _PREFETCH_BYTES = 60_000, 64 << 20
"""How much is prefetched: about the next batch of such a reader, and small enough for a worker to keep twice."""


def messages_between(after: KafkaPosition, until: KafkaPosition) -> int:
    """The number of offsets between two positions: at least the number of rows."""
    return sum(item.end - (item.start or 0) for item in ranges_between(after, until))


def ranges_between(after: KafkaPosition, until: KafkaPosition) -> list[OffsetRange]:
    """What to read between two positions.

    A topic that `after` does not have was created later, so its offset 0 must still exist. Before the very first
    position, reading starts at the first retained offset.
    """
    found = []
    for topic, extent in until.topics.items():
        known = after.topics.get(topic, TopicExtent(extent.id, (0,) * len(extent.ends)))
        for partition, (start, end) in enumerate(zip(known.ends, extent.ends, strict=True)):
            if start < end:
                found.append(OffsetRange(topic, partition, None if after.marker < 0 else start, end))
    return found


def share_of(ranges: Sequence[OffsetRange]) -> Share:
    """These ranges as a share: whole partitions, so whole keys."""
    return Share(json.dumps([astuple(item) for item in ranges]))


def read_share(reader: "RangeReader", share: Share) -> Iterator[pa.Table]:
    """The rows of a share, some of each partition at a time, in the order of each partition."""
    ranges, step = [OffsetRange(*item) for item in json.loads(share)], _SHARE_MESSAGES
    while ranges:
        each = max(step // len(ranges), 1)
        some = [item if item.start is None else replace(item, end=min(item.end, item.start + each)) for item in ranges]
        parts = reader.read(some)
        yield from (part.rows for part in parts)
        ends = {item.address: item.end for item in some} | {part.range.address: part.range.end for part in parts}
        rest = [replace(item, start=ends[item.address]) for item in ranges if ends[item.address] < item.end]
        step = 2 * step if rest == ranges else _SHARE_MESSAGES  # a change may have more messages than were read
        ranges = rest


def check_topics(cluster: Cluster, after: KafkaPosition, until: KafkaPosition) -> None:
    """Raise LogCorrupt if the topics of a position are not those of the cluster: same id, same partitions."""
    found = cluster.admin.existing(until.topics)
    for position in (after, until):
        for name, extent in position.topics.items():
            require_unchanged(name, extent, found.get(name))


def require_kept(cluster: Cluster, ranges: Sequence[OffsetRange], topics: Iterable[Topic]) -> None:
    """Raise ChangesRemoved if the brokers no longer have a part of these ranges. One request; a read finds out too."""
    named = {item.topic for item in ranges}
    starts = cluster.admin.starts([topic for topic in topics if topic.name in named])
    for item in ranges:
        _require_kept(item, starts[item.address])


def _require_kept(item: OffsetRange, low: int) -> None:
    if item.start is not None and item.start < low:
        raise ChangesRemoved(
            f"Retention removed offsets {item.start} to {low - 1} of {item.topic}-{item.partition} before they were"
            " read.",
            "Start the reader again from a snapshot (millrace resync), and raise log.retention_hours.",
        )


def decode_envelopes(records: Sequence[Record]) -> Decoded:
    """Decode records that the log's writer wrote."""
    keys = pa.array([key for _, key, _ in records], pa.binary())
    return decode(keys, pa.array([value for _, _, value in records], pa.binary()))


class RangeReader:
    """Keeps its connection between calls: opening one costs more than reading a small batch.

    With `prefetch` it fetches and decodes the next messages in a thread while a reader that catches up processes the
    last ones. It returns only the requested ranges. Safe for several threads; one reads at a time.
    """

    def __init__(self, cluster: Cluster, decoded: Decode = decode_envelopes, *, prefetch: bool = False) -> None:
        self._cluster = cluster
        self._decoded = decoded
        self._prefetch = prefetch
        self._consumer: Consumer | None = None
        self._known_topics: set[str] = set()
        self._feed: Feed | None = None
        self._prefetcher: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.RLock()

    def read(self, ranges: Iterable[OffsetRange]) -> list[RangeRows]:
        """The rows of each range that has any or could not be read to its end, in the order of the ranges."""
        wanted = [item for item in ranges if item.start is None or item.start < item.end]
        with self._lock:
            self._stop_prefetch()
            try:
                found = self._read(wanted) if wanted else []
            except BaseException:
                self.close()
                raise
        asked = {item.address: item.end for item in wanted}
        return [part for part in found if part.rows.num_rows or part.range.end < asked[part.range.address]]

    def close(self) -> None:
        """Close the connection. The next read opens a new one."""
        with self._lock:
            self._stop_prefetch()
            self._feed = None
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None
                self._known_topics.clear()

    def _read(self, wanted: Sequence[OffsetRange]) -> list[RangeRows]:
        if self._consumer is None:
            # The broker answers an empty fetch after this long: it bounds how late the end of a range is detected.
            self._consumer = self._cluster.consumer(**{"fetch.wait.max.ms": 20, "fetch.error.backoff.ms": 20})
        self._load_metadata(self._consumer, {item.topic for item in wanted})
        continued = self._feed.continued(wanted) if self._feed is not None else set()
        if self._feed is None or not continued:
            self._feed = Feed(self._consumer, self._decoded, self._cluster.settings.foreign)
        feed = self._feed
        begun = {item.address: _start(self._consumer, item) for item in wanted if item.address not in continued}
        wanted = [item for item in wanted if begun.get(item.address, 0) < item.end]
        feed.assign({item.address: begun[item.address] for item in wanted if item.address in begun}, continued)
        _receive(feed, self._consumer, wanted)
        found = [feed.take(item) for item in wanted]
        self._prepare_next(feed, bool(continued), sum(item.end - (item.start or 0) for item in wanted))
        return found

    def _load_metadata(self, consumer: Consumer, topics: set[str]) -> None:
        """Request the metadata of new topics: a consumer by itself would retry only once a second."""
        for topic in topics - self._known_topics:
            with translating_errors(f"asking for the leaders of {topic}"):
                consumer.list_topics(topic, CALL_SECONDS)
            self._known_topics.add(topic)

    def _prepare_next(self, feed: Feed, continued: bool, messages: int) -> None:
        """Keep the assignment, and prefetch if the last read continued the one before: the next may continue too."""
        if not self._prefetch or messages < _PREFETCH_FROM:
            self._feed = None
            if self._consumer is not None:
                self._consumer.unassign()
        elif continued:
            self._stop.clear()
            self._prefetcher = threading.Thread(
                target=self._prefetch_messages, args=(feed,), name="kafka-prefetch", daemon=True
            )
            self._prefetcher.start()

    def _prefetch_messages(self, feed: Feed) -> None:
        left = _PREFETCH_BYTES
        feed.take_received_bytes()
        try:
            while not self._stop.is_set() and left > 0 and feed.prefetched < _PREFETCH_MESSAGES and feed.poll(0.05):
                left -= feed.take_received_bytes()
                feed.decode()
        except (LogError, RefusedByBroker):
            self._feed = None  # the next read meets the same error and raises it

    def _stop_prefetch(self) -> None:
        if self._prefetcher is not None:
            self._stop.set()
            self._prefetcher.join()
            self._prefetcher = None


def _start(consumer: Consumer, item: OffsetRange) -> int:
    return watermarks(consumer, item.topic, item.partition)[0] if item.start is None else item.start


def _receive(feed: Feed, consumer: Consumer, wanted: Sequence[OffsetRange]) -> None:
    """Receive until all wanted ranges are complete."""
    by_address: Mapping[Address, OffsetRange] = {item.address: item for item in wanted}
    quiet_until = time.monotonic() + _SILENCE_SECONDS
    while not feed.covers(wanted):
        try:
            came = feed.poll(0.2)
        except RefusedByBroker as refused:
            _raise_if_lost(by_address[refused.address], consumer)
            topic, partition = refused.address
            raise translate_error(refused.error, f"reading {topic}-{partition}") from None
        if came:
            quiet_until = time.monotonic() + _SILENCE_SECONDS
        elif time.monotonic() > quiet_until:
            for item in wanted:
                _raise_if_lost(item, consumer)
            raise LogLost("Kafka delivered no message for 30 s.", "Check the brokers.")


def _raise_if_lost(item: OffsetRange, consumer: Consumer) -> None:
    """Raise LogCorrupt if the broker no longer has a part of the range."""
    name = f"{item.topic}-{item.partition}"
    low, high = watermarks(consumer, item.topic, item.partition)
    _require_kept(item, low)
    if item.end > high:
        raise LogCorrupt(
            f"{name} ends at offset {high}, but the log's position says {item.end}: messages are lost.",
            "The topic was deleted or restored from an older copy: start with a new prefix and snapshot.",
        )
