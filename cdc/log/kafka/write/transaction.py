"""One Kafka transaction after the other, each until it is committed or cannot be.

`init_transactions` aborts what an earlier writer left open and fences whoever lives on: there is one writer.
"""

import time
import warnings
from collections.abc import Callable

from confluent_kafka import KafkaException, Producer

from cdc.errors import LogError, LogFenced, LogLost
from cdc.log.kafka.client import Cluster, in_our_words
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.write.offsets import Mispredicted, Offsets
from cdc.log.kafka.write.producer import Undelivered

_BACKOFF_SECONDS = 0.5
_INITIALISE_SECONDS = 60.0
_QUEUE_BYTES = 16 << 20
"""What waits for the brokers; twice as much is no quicker."""

Fill = Callable[[Producer], None]
"""Produces a transaction's messages and sees that they were acknowledged."""
Durable = Callable[[], bool]
"""Whether a transaction counts that nobody heard the end of; reads the log again to know."""


class Transactions:
    """The producer that may write. `check` is called before each further try: it raises where none can help."""

    def __init__(self, cluster: Cluster, settings: KafkaSettings, offsets: Offsets, check: Callable[[], None]) -> None:
        self._cluster = cluster
        self._settings = settings
        self._offsets = offsets
        self._check = check
        self.producer = self._opened()

    def run(self, fill: Fill, durable: Durable, doing: str) -> None:
        """Commit what `fill` produces.

        After a failed commit nobody knows whether it counts: a new producer makes the broker finish it one way or the
        other, and the position topic tells which (`durable`).
        """
        deadline = time.monotonic() + self._settings.patience_seconds
        while True:
            try:
                self.producer.begin_transaction()
                fill(self.producer)
                self._commit(deadline)
                return
            except (Mispredicted, Undelivered, KafkaException, LogLost) as error:
                failure = _failure(error, doing)
            except BaseException:
                self._offsets.forget()
                self._abort()
                raise
            self._offsets.forget()
            self._give_up_if_hopeless(failure, deadline)
            if not self._abort():
                self._reopen(deadline)
                if durable():
                    return
            self._check()
            time.sleep(0.01 if isinstance(failure, Disturbed) else _BACKOFF_SECONDS)

    def close(self) -> None:
        """Let go of the connections; an open transaction is aborted by the next writer."""
        with warnings.catch_warnings():
            # A fenced producer cannot abort any more, and says so; its successor has done it.
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
        """False if this producer cannot go on."""
        try:
            self.producer.purge()
            self.producer.abort_transaction(30.0)
        except KafkaException as error:
            said = in_our_words(error.args[0], "aborting")
            if isinstance(said, LogFenced):
                raise said from None
            return False
        return True

    def _give_up_if_hopeless(self, failure: LogError, deadline: float) -> None:
        if not failure.transient or time.monotonic() > deadline:
            if not isinstance(failure, LogFenced):
                self._abort()
            raise failure

    def _reopen(self, deadline: float) -> None:
        while True:
            try:
                self.producer = self._opened()
                return
            except LogLost:
                if time.monotonic() > deadline:
                    raise

    def _opened(self) -> Producer:
        settings = self._settings
        options: dict[str, str | int | float | bool] = {
            "transactional.id": settings.system_topic("writer"),
            "transaction.timeout.ms": settings.transaction_timeout_seconds * 1000,
            "message.max.bytes": settings.max_message_bytes,
            "compression.type": settings.compression,
            "linger.ms": 0,
            "batch.num.messages": 10_000,
            "queue.buffering.max.messages": 100_000,
            # A message that is larger than the whole queue would never be let in.
            "queue.buffering.max.kbytes": max(_QUEUE_BYTES, 2 * settings.max_message_bytes) >> 10,
        }
        producer = self._cluster.producer(**options)
        try:
            producer.init_transactions(min(_INITIALISE_SECONDS, settings.patience_seconds))
        except KafkaException as error:
            raise in_our_words(error.args[0], "becoming the log's writer") from None
        return producer


class Disturbed(LogLost):
    """Messages came to lie elsewhere than they should. It is tried again at once."""


def _failure(error: Exception, doing: str) -> LogError:
    match error:
        case Mispredicted():
            return Disturbed(
                f"Messages to {error} do not come to lie where they should: some were lost, or somebody else writes "
                "there.",
                "Nobody but the log's writer may write to its topics: see the ACLs in docs/kafka.md.",
            )
        case Undelivered():
            return in_our_words(error.reason, doing)
        case KafkaException():
            return in_our_words(error.args[0], doing)
        case LogError():
            return error
    raise error
