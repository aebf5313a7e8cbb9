"""Stores that lost what they held: noticed, held, and filled again.

What each table of a store last showed of itself (`sinks.fingerprints`) is kept here, with the place in the log at which
that was. A table that shows something else is lost: it is held from that place on, in the log like a paused one, and
the sink's position counts for nothing until the table is as it was, or was made anew and every row read again.

An older copy that says how far it goes lacks nothing but the changes since: those are applied again from the log.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from cdc.config.settings import Settings, SinkSettings
from cdc.errors import MillraceError
from cdc.model import ZERO_LSN, Lsn, TableId, TableSchema, parse_lsn
from cdc.ports import LogReader
from cdc.service.apply.paused_tables import TableRequests
from cdc.service.state import status
from cdc.service.state.sink_positions import by_name, consumer_name
from cdc.service.state.store_files import LogPosition, Loss, StoredMark, StoreFiles
from sinks.apply.applier import Applier
from sinks.fingerprints import Difference, Fingerprinted, Positioned

LOOK_SECONDS = 5.0
"""A look is a request or two: every five seconds they are not measurable beside the batches."""
_ENDED = {"failed": "failed", "cancelled": "was cancelled"}
_log = logging.getLogger(__name__)
Ask = Callable[[TableId], str]
"""Asks capture to read a table again as a whole; returns the backfill's id."""


class LostTables:
    """One sink's marks and losses: a `FingerprintRecorder`. The applier calls in its turn, the worker calls
    `tend` beside it: each changes a loss only as long as the other has not."""

    def __init__(self, settings: Settings, sink: SinkSettings, log: LogReader, ask: Ask) -> None:
        self._settings = settings
        self._sink = sink
        self._log = log
        self._ask = ask
        self._files = StoreFiles(settings.state, sink.name)
        self._seen, self._losses = self._files.marks(), self._files.losses()
        self._reached = ZERO_LSN
        self._changing = threading.Lock()
        self._due = 0.0
        self._wishes = TableRequests()
        for table in self.lost:  # a process that ended between two steps may not have held it yet
            self._hold(table, self._losses[table].place, anew=False)

    def follow(self, wishes: TableRequests) -> None:
        """What is asked of the sink's tables now. What was lost of others, or is skipped, is nobody's concern."""
        self._wishes = wishes
        for table, loss in list(self._losses.items()):
            if not self._followed(table):
                self._change(table, loss, None)

    def facts(self) -> dict[str, dict[str, str]]:
        """By table, for the status."""
        return {str(table): loss.facts() for table, loss in sorted(self._losses.items())}

    def held(self, wishes: TableRequests) -> TableRequests:
        """What is to be held, with what is lost."""
        return replace(wishes, paused=wishes.paused | self.lost)

    # -- called by the applier: sinks.fingerprints.FingerprintRecorder

    @property
    def lost(self) -> frozenset[TableId]:
        """Tables that must not be written."""
        return frozenset(table for table, loss in self._losses.items() if loss.waits)

    def connected(self) -> None:
        """The next look is due at once."""
        self._due = 0.0

    def look(self, sink: object) -> frozenset[TableId]:
        """Compare, if it is time. Returns the tables that are to be held from now on."""
        if time.monotonic() < self._due or not isinstance(sink, Fingerprinted):
            return frozenset()
        known = {table: seen.mark for table, seen in self._seen.items() if self._followed(table)}
        place = self._position()
        self._reached = max(self._reached, place.reached)
        shown = sink.look(known, place.reached) if known else {}
        self._due = time.monotonic() + LOOK_SECONDS
        differing = {table: seen for table, seen in shown.items() if isinstance(seen, Difference)}
        found = {table: StoredMark(seen, place) for table, seen in shown.items() if not isinstance(seen, Difference)}
        fresh = frozenset(table for table, difference in differing.items() if self._lose(table, difference))
        if fresh and isinstance(sink, Positioned):
            sink.passed(place.reached)  # what an older copy lacks is held: its position is the sink's again
        self._find(found)
        self._keep({**self._seen, **found})
        return fresh

    def prepared(self, sink: object, schema: TableSchema) -> None:
        """Sign a table that has no mark yet."""
        if isinstance(sink, Fingerprinted) and schema.table not in self._seen:
            self._keep({**self._seen, schema.table: StoredMark(sink.sign(schema), self._position())})

    def renewed(self, sink: object, schema: TableSchema) -> None:
        """Sign a table again."""
        if isinstance(sink, Fingerprinted):
            self._keep({**self._seen, schema.table: StoredMark(sink.sign(schema), self._position())})
            self.passed(sink, ZERO_LSN)

    def passed(self, sink: object, reached: Lsn) -> None:
        """Have the store note how far it is, where it does that."""
        if isinstance(sink, Positioned):
            self._reached = max(self._reached, reached)  # a query that begins again repeats batches
            sink.passed(self._reached)

    # -- called beside the batches

    def tend(self, applier: Applier) -> None:
        """Take the next step with every table that is to be filled again. Raises what is worth another attempt."""
        asked = self._files.asked_refills()
        for table, loss in list(self._losses.items()):
            wanted = table in asked or (self._sink.on_loss == "refill" and loss.state == "lost")
            now = self._change(table, loss, replace(loss, state="renewing")) if wanted and loss.refill else loss
            if now is not None and now.state == "renewing":
                now = self._renew(applier, table, now)
            if now is not None and now.state == "asking":
                now = self._begin(table, now)
            if now is not None and now.state in ("refilling", "rewinding"):
                self._advance(applier, table, now)
        if asked:
            self._files.forget_request()

    def _renew(self, applier: Applier, table: TableId, loss: Loss) -> Loss | None:
        schema = next((schema for schema in self._log.schemas.newest() if schema.table == table), None)
        try:
            if schema is not None:
                applier.renew(schema)
        except MillraceError as error:
            if error.transient:
                raise
            return self._change(table, loss, replace(loss, message=f"cannot be made anew: {error.message}"))
        _log.warning("sink %s: %s was made anew, empty; its rows are read again", self._sink.name, table)
        return self._change(table, loss, replace(loss, state="asking"))

    def _begin(self, table: TableId, loss: Loss) -> Loss | None:
        """Ask for all its rows; where nobody reads the source for us, the log is all that there is to read again."""
        if self._settings.log.kind == "debezium":
            offset, head = self._log.head()
            self._hold(table, LogPosition(ZERO_LSN, self._log.start()), anew=True)
            said = "lost its rows; what the topics keep of them is applied again"
            return self._change(
                table, loss, replace(loss, state="rewinding", message=said, until=LogPosition(head, offset))
            )
        identity = self._ask(table)
        said = f"lost its rows; backfill {identity} reads them again"
        waiting = replace(loss, state="refilling", backfill=identity, until=None, message=said)
        return self._change(table, loss, replace(waiting, remedy="Wait; its progress: millrace backfill"))

    def _advance(self, applier: Applier, table: TableId, loss: Loss) -> None:
        """Forget the loss once the sink has passed the end of the log of when everything missing was in it."""
        now = self._read_again(table, loss) if loss.until is None else loss
        if now is None or now.until is None or table in applier.held:
            return
        here = self._position()
        if here.reached > now.until.reached or here.offset == now.until.offset:
            self._change(table, now, None)
            _log.warning("sink %s: %s holds its rows again", self._sink.name, table)

    def _read_again(self, table: TableId, loss: Loss) -> Loss | None:
        """Whether the backfill has ended, and how."""
        facts = status.read(self._settings.state, "capture")
        exact, jobs = facts.get("history_exact_from"), facts.get("backfills")
        states = {job["id"]: job["state"] for job in jobs} if isinstance(jobs, list) else {}
        state = states.get(loss.backfill)
        snapshot = isinstance(exact, str) and exact and parse_lsn(exact) > int(loss.backfill, 16)
        if snapshot or state == "done":
            offset, head = self._log.head()
            return self._change(table, loss, replace(loss, until=LogPosition(head, offset)))
        if state in ("failed", "cancelled"):
            message = f"lost its rows, and backfill {loss.backfill}, which reads them again, {_ENDED[state]}"
            resumed = f"millrace backfill --resume {loss.backfill}"
            remedy = f"Go on with: {resumed if state == 'failed' else self._command()}"
            return self._change(table, loss, replace(loss, message=message, remedy=remedy))
        return loss

    # -- what is kept

    def _lose(self, table: TableId, difference: Difference) -> bool:
        """Note what is lost and hold it; whether that is news."""
        before, loss = self._losses.get(table), self._judged(table, difference)
        if before is not None and before.state == "renewing":
            return False
        if before is not None and before.waits and loss.waits:
            self._change(table, before, replace(loss, place=before.place, final=before.final or loss.final))
            return False
        self._change(table, before, loss)
        self._hold(table, loss.place, anew=True)
        _log.error("sink %s: %s %s. %s", self._sink.name, table, loss.message, loss.remedy)
        return True

    def _judged(self, table: TableId, difference: Difference) -> Loss:
        copied = difference.whole_up_to
        if copied is not None and copied > ZERO_LSN and self._log.removed() < copied:
            offset, head = self._log.head()
            # of entries that end at one LSN, as those of a snapshot do, the copy may have the first ones only
            since = LogPosition(Lsn(copied - 1), self._log.seek(Lsn(copied - 1)))
            message = f"{difference.message}; what it lacks is applied again from the log"
            return Loss(message, "Wait; nothing else is needed.", since, "rewinding", until=LogPosition(head, offset))
        remedy = " ".join(filter(None, [difference.remedy, self._again() if difference.refill else ""]))
        place = self._seen[table].place
        return Loss(difference.message, remedy, place, refill=difference.refill, final=copied is not None)

    def _find(self, found: Mapping[TableId, object]) -> None:
        """Tables that are as they were: what they missed meanwhile is in the log."""
        for table, loss in list(self._losses.items()):
            if table in found and loss.state == "lost" and not loss.final:
                self._change(table, loss, None)
                _log.warning("sink %s: %s is as it was and goes on", self._sink.name, table)

    def _hold(self, table: TableId, place: LogPosition, *, anew: bool) -> None:
        """Keep what the table has to get from a place on. One that was held before may have got some of it: anew."""
        name = consumer_name(self._sink.name, table)
        held = by_name(self._log.consumers()).get(name)
        if held is not None and (not anew or held.reached <= place.reached):
            return
        if held is not None:
            self._log.forget(name)
        self._log.commit(name, place.reached, place.offset)

    def _position(self) -> LogPosition:
        mine = by_name(self._log.consumers()).get(self._sink.name)
        return LogPosition(mine.reached, mine.offset) if mine else LogPosition()

    def _followed(self, table: TableId) -> bool:
        return self._wishes.has(table) and table not in self._wishes.skipped

    def _change(self, table: TableId, before: Loss | None, after: Loss | None) -> Loss | None:
        """Durable on return, unless the loss was changed since it was looked at; returns what is so now."""
        with self._changing:
            if self._losses.get(table) == before and before != after:
                others = {other: loss for other, loss in self._losses.items() if other != table}
                losses = others if after is None else {**others, table: after}
                self._files.write_losses(losses)
                self._losses = losses
            return self._losses.get(table)

    def _keep(self, seen: dict[TableId, StoredMark]) -> None:
        if seen != self._seen:
            self._files.write_marks(seen)
            self._seen = seen

    def _command(self) -> str:
        return f"millrace refill {self._sink.name}"

    def _again(self) -> str:
        return f"To have it made anew and its rows read again: {self._command()}"
