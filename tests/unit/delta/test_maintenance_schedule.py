"""When maintenance runs."""

import threading

from cdc.errors import SinkError
from cdc.model import TableId, TableSchema
from sinks.delta.maintenance import MaintenanceResult
from sinks.delta.maintenance_schedule import MaintenanceSchedule

ITEMS = TableSchema(TableId("public", "items"), ())
OTHER = TableSchema(TableId("public", "other"), ())


class Care:
    def __init__(self) -> None:
        self.now = 0.0
        self.rounds: list[str] = []
        self.hold = threading.Event()
        self.hold.set()

    def __call__(self, schema: TableSchema) -> MaintenanceResult:
        self.hold.wait(10)
        self.rounds.append(schema.table.name)
        if schema is OTHER:
            raise SinkError("refused")
        return MaintenanceResult()

    def caretaker(self, every: float) -> MaintenanceSchedule:
        return MaintenanceSchedule(every, self, lambda: self.now)


def written(caretaker: MaintenanceSchedule, *schemas: TableSchema) -> None:
    for schema in schemas:
        caretaker.written(schema)
        caretaker.finish(10)


def test_a_table_gets_its_round_after_a_quarter_and_then_once_in_a_while() -> None:
    care = Care()
    caretaker = care.caretaker(100)
    for care.now in (0, 24, 26, 50, 125, 127):
        written(caretaker, ITEMS)
    assert care.rounds == ["items", "items"]


def test_only_one_round_runs_and_the_stream_does_not_wait_for_it() -> None:
    care = Care()
    caretaker = care.caretaker(100)
    written(caretaker, ITEMS, OTHER)
    care.now = 30
    care.hold.clear()
    caretaker.written(ITEMS)
    caretaker.written(OTHER)
    assert care.rounds == []
    care.hold.set()
    caretaker.finish(10)
    written(caretaker, OTHER)
    assert care.rounds == ["items", "other"]


def test_a_round_that_fails_is_not_the_end_of_care() -> None:
    care = Care()
    caretaker = care.caretaker(100)
    for care.now in (0, 30, 150):
        written(caretaker, OTHER)
    assert care.rounds == ["other", "other"]


def test_no_care_where_none_is_wanted() -> None:
    care = Care()
    caretaker = care.caretaker(0)
    for care.now in (0, 1000):
        written(caretaker, ITEMS)
    assert care.rounds == []
