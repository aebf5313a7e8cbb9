"""Runs Kafka transactions one after another, each retried until it commits or fails for good.

`init_transactions` aborts the open transaction of an earlier writer and fences that writer off: there is one writer.
"""

import time
import warnings
from collections.abc import Callable

from confluent_kafka import KafkaException, Producer

from cdc.errors import LogError, LogFenced, LogLost
from cdc.log.kafka.client import Cluster, translate_error
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.write.offsets import Offsets, UnexpectedOffset
from cdc.log.kafka.write.producer import Undelivered

_BACKOFF_SECONDS = 0.5
_INITIALISE_SECONDS = 60.0
_QUEUE_BYTES = 16 << 20
"""Bytes queued for the brokers; twice as much is not faster."""

Fill = Callable[[Producer], None]
"""Produces a transaction's messages and waits until they are acknowledged."""
Durable = Callable[[], bool]
"""Whether a transaction with an unknown outcome was committed; reads the position topic again."""


class Transactions:
    """The transactional producer. Calls `check` before each retry; it raises if a retry cannot succeed."""

    def __init__(self, cluster: Cluster, settings: KafkaSettings, offsets: Offsets, check: Callable[[], None]) -> None:
        self._cluster = cluster
        self._settings = settings
        self._offsets = offsets
        self._check = check
        self.producer = self._new_producer()

    def run(self, fill: Fill, durable: Durable, doing: str) -> None:
        """Commit what `fill` produces.

        After a failed commit the outcome is unknown: a new producer makes the broker complete or abort the transaction,
        and then `durable` reads the outcome from the position topic.
        """
        deadline = time.monotonic() + self._settings.patience_seconds
        while True:
            try:
                self.producer.begin_transaction()
                fill(self.producer)
                self._commit(deadline)
                return
            except (UnexpectedOffset, Undelivered, KafkaException, LogLost) as error:
                failure = _failure(error, doing)
            except BaseException:
                self._offsets.forget()
                self._abort()
                raise
            self._offsets.forget()
            self._raise_if_final(failure, deadline)
            if not self._abort():
                self._reopen(deadline)
                if durable():
                    return
            self._check()
            time.sleep(0.01 if isinstance(failure, OffsetMismatch) else _BACKOFF_SECONDS)

    def close(self) -> None:
        """Close the connections. The next writer aborts an open transaction."""
        with warnings.catch_warnings():
            # A fenced producer warns that it cannot abort; the new writer has already aborted its transaction.
            warnings.simplefilter("ignore", RuntimeWarning)
            self.producer.close()

    def _commit(self, deadline: float) -> None:
        while True:
            try:
                self.producer.commit_transaction(10.0)
                return
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise

    def _abort(self) -> bool:
        """Abort the transaction; False if this producer can no longer be used."""
        try:
            self.producer.purge()
            self.producer.abort_transaction(30.0)
        except KafkaException as error:
            translated = translate_error(error.args[0], "aborting")
            if isinstance(translated, LogFenced):
                raise translated from None
            return False
        return True

    def _raise_if_final(self, failure: LogError, deadline: float) -> None:
        if not failure.transient or time.monotonic() > deadline:
            if not isinstance(failure, LogFenced):
                self._abort()
            raise failure

    def _reopen(self, deadline: float) -> None:
        while True:
            try:
                self.producer = self._new_producer()
                return
            except LogLost:
                if time.monotonic() > deadline:
                    raise

    def _new_producer(self) -> Producer:
        settings = self._settings
        options: dict[str, str | int | float | bool] = {
            "transactional.id": settings.system_topic("writer"),
            "transaction.timeout.ms": settings.transaction_timeout_seconds * 1000,
            "message.max.bytes": settings.max_message_bytes,
            "compression.type": settings.compression,
            "linger.ms": 0,
            "batch.num.messages": 10_000,
            "queue.buffering.max.messages": 100_000,
            # A message larger than the whole queue would never be accepted.
            "queue.buffering.max.kbytes": max(_QUEUE_BYTES, 2 * settings.max_message_bytes) >> 10,
        }
        producer = self._cluster.producer(**options)
        try:
            producer.init_transactions(min(_INITIALISE_SECONDS, settings.patience_seconds))
        except KafkaException as error:
            raise translate_error(error.args[0], "becoming the log's writer") from None
        return producer


class OffsetMismatch(LogLost):
    """Messages were stored at other offsets than expected. The transaction is retried at once."""


def _failure(error: Exception, doing: str) -> LogError:
    match error:
        case UnexpectedOffset():
            return OffsetMismatch(
                f"Messages to {error} have unexpected offsets: some were lost, or another process writes there.",
                "Only the log's writer may write to its topics: see the ACLs in docs/kafka.md.",
            )
        case Undelivered():
            return translate_error(error.reason, doing)
        case KafkaException():
            return translate_error(error.args[0], doing)
        case LogError():
            return error
    raise error
