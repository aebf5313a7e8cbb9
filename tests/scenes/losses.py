"""A sink on a real store and a real log, fed by hand as a query would, with a source of two tables that can be read
again: what happens when the store loses what it held."""

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cdc.config.settings import Settings
from cdc.model import ZERO_LSN, Lsn, TableId, TableSchema
from cdc.ports import Sink
from cdc.service.apply.held_back_tables import HeldBackTables, TableRequests
from cdc.service.apply.lost_tables import LostTables
from cdc.service.apply.refill import TableRefill
from cdc.service.observe.positions import Positions
from cdc.service.state import status
from cdc.service.state.skipped_tables import SkippedTables
from cdc.service.state.store_files import StoreFiles
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.apply.errors import TableLost
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from tests.fix_log import FilledLog
from tests.fix_processes import wait_until
from tests.scenes.histories import Row, change, images, log_table, table
from views.output_files import OutputFolder

ITEMS, OTHERS = table(), table("others")
BACKFILLED = 5
"""The version of rows that are read again: below every change."""


class NoRefill:
    """No table of the scene is skipped."""

    def reads_newer_than(self, version: Lsn) -> bool:
        raise AssertionError(version)

    def request(self, table: TableId) -> str:
        raise AssertionError(table)

    def emit_again(self, view: TableId) -> str:
        raise AssertionError(view)


class _Asked(NoRefill):
    """Asks the scene for backfills, and views by their files."""

    def __init__(self, scene: "LossScene") -> None:
        self._scene = scene
        self.emit_again = TableRefill(scene.settings, scene.log.reader).emit_again  # type: ignore[method-assign]

    def request(self, table: TableId) -> str:
        return self._scene.ask(table)


class LossScene:
    """`open_sink` connects to the store; with every look due, nothing waits for a clock."""

    def __init__(self, log: FilledLog, settings: Settings, open_sink: Callable[[], Sink]) -> None:
        self.log = log
        self.settings = settings
        self.open_sink = open_sink
        self.rows: dict[TableId, dict[str, str]] = {ITEMS.table: {}, OTHERS.table: {}}
        self.versions: dict[TableId, dict[str, tuple[int, str]]] = {ITEMS.table: {}, OTHERS.table: {}}
        self.asked: list[TableId] = []
        self.requests = TableRequests()
        for schema in (ITEMS, OTHERS):
            log.record(schema)
        self._version = 100
        self._requests = int(self.log.writer.progress().end)
        self.start()

    def start(self) -> None:
        """What a new process does."""
        sink = self.settings.sinks[0]
        self.losses = LostTables(self.settings, sink, self.log.reader, _Asked(self))
        self.losses.follow(self.requests)
        self.applier = Applier(
            sink.name,
            open_sink=self.open_sink,
            log=self.log.reader,
            letters=DeadLetters(self.settings.state / "dead-letters" / sink.name),
            stop=threading.Event(),
            watch=self.losses,
        )
        skipped = SkippedTables(self.settings.state, sink.name)
        self.held_back = HeldBackTables(self.log.reader, self.applier, skipped, _Asked(self), self.requests)
        self.held_back.restore()
        self.applier.open_store()

    def write(self, *labels: str, schema: TableSchema = ITEMS) -> None:
        """Rows 0, 1, … of a table get these labels: a batch of the stream."""
        self._apply([self._row(schema, key, label) for key, label in enumerate(labels)])

    def delete(self, key: int, schema: TableSchema = ITEMS) -> None:
        """A row goes: a batch of the stream."""
        self._version += 1
        self.rows[schema.table].pop(f'{{"id":{key}}}')
        self.versions[schema.table].pop(f'{{"id":{key}}}')
        self._apply([change("d", f'{{"id":{key}}}', self._version, table=str(schema.table))])

    def both(self, *labels: str) -> None:
        """As `write`, both tables in one batch."""
        self._apply([self._row(schema, key, label) for schema in (ITEMS, OTHERS) for key, label in enumerate(labels)])

    def _row(self, schema: TableSchema, key: int, label: str) -> Row:
        self._version += 1
        after = f'{{"id":{key},"label":"{label}"}}'
        self.rows[schema.table][f'{{"id":{key}}}'] = after
        self.versions[schema.table][f'{{"id":{key}}}'] = (self._version, after)
        return change("u", f'{{"id":{key}}}', self._version, after, table=str(schema.table))

    def _apply(self, rows: list[Row]) -> None:
        end = self.log.append(rows)
        batch = gather(ranked(log_table(rows)), self.log.reader.schemas)
        self.applier.apply(replace(batch, reached=end))

    # -- what runs beside the batches

    def attend(self) -> None:
        """One round of whoever attends to the sink."""
        self.applier.check_losses()
        self.losses.repair(self.applier)
        with contextlib.suppress(TableLost):
            self.held_back.follow(self.losses.with_lost(self.requests))

    def ask(self, asked: TableId) -> str:
        self.asked.append(asked)
        self._requests += 1
        return f"{self._requests:X}"

    def emit_again(self, table: TableId) -> None:
        """What a view does with the request: its rows come through the log, each with the version that it had."""
        folder = OutputFolder(self.settings.state, table.name)
        request = folder.asked_to_emit_again()
        assert request
        rows = [
            change("r", key, version, after, table=str(table)) for key, (version, after) in self.versions[table].items()
        ]
        self._apply([{**row, "commit_lsn": self.log.writer.progress().end} for row in rows])
        folder.emitted_again(request)

    def read_again(self) -> None:
        """What capture does with the request: the table's rows come through the log, and the backfill is done."""
        for asked in self.asked:
            rows = [change("r", key, BACKFILLED, after, table=str(asked)) for key, after in self.rows[asked].items()]
            self._apply([{**row, "commit_lsn": self.log.writer.progress().end + 1} for row in rows])
            loss = self.files.losses()[asked]
            job = {"id": loss.backfill, "table": str(asked), "state": "done", "whole": True, "rows": len(rows)}
            known: Any = status.read(self.settings.state, "capture").get("backfills", [])
            status.publish(self.settings.state, "capture", {"backfills": [*known, job]})
        self.asked.clear()

    def refilled(self) -> None:
        """Everything until nothing is lost any more."""

        def step() -> bool:
            self.attend()
            self.read_again()
            return not self.losses.facts()

        wait_until(step, 60, "nothing is lost")

    # -- what is to be seen

    @property
    def name(self) -> str:
        return self.settings.sinks[0].name

    @property
    def files(self) -> StoreFiles:
        return StoreFiles(self.settings.state, self.name)

    def said(self) -> dict[str, str]:
        """Table to what is said of its loss."""
        return {name: facts["message"] for name, facts in self.losses.facts().items()}

    def counts(self, *schemas: TableSchema) -> bool:
        """Whether the sink's position counts, for all tables or for these."""
        position = Positions(self.settings, self.log.reader).by_sink()[self.name]
        return position.reached_for([str(schema.table) for schema in schemas]) > ZERO_LSN

    def labels(self, schema: TableSchema = ITEMS) -> list[str]:
        """As the store has them."""
        sink = self.open_sink()
        rows = sink.stored(schema).to_pylist()
        sink.close()
        return [json.loads(row["after"])["label"] if "after" in row else row["label"] for row in rows]

    def equal(self) -> bool:
        """Whether the store holds exactly what the source holds."""
        sink = self.open_sink()
        found = [
            sink.stored(schema).to_pylist() == sink.expected(schema, images(self.rows[schema.table])).to_pylist()
            for schema in (ITEMS, OTHERS)
        ]
        sink.close()
        return all(found)
