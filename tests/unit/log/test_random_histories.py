"""Any sequence of appends, spools, merges, crashes and restarts ends in the same log as a list would."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cdc import failpoint
from cdc.log.segments.log import SegmentSettings
from cdc.log.segments.reader import SegmentReader
from cdc.model import Entry, Lsn
from cdc.ports import Offset
from tests.contract.logs import commits, read_all, rows
from tests.scenes.segment_logs import folder_reader, folder_writer

POINTS = st.sampled_from(
    [
        "log.before_write",
        "log.before_rename",  # in a folder
        "log.before_put",  # in a bucket
        "log.after_put",
        "log.after_append",
        "log.spool_publish",
        "log.merge_before_publish",
        "log.merge_after_publish",
        "log.merge_removing",
    ]
)


class LogMachine(RuleBasedStateMachine):
    """The real log beside a list of the entries that it must hold."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(mkdtemp(prefix="millrace-log-"))
        self.model: list[int] = []
        self.marks: dict[str, str] = {}
        self.sent = 0
        self.open()

    def open(self) -> None:
        self.writer = folder_writer(self.root, SegmentSettings(hot_segments=3, retention_hours=1e6))

    def reader(self) -> SegmentReader:
        return folder_reader(self.root)

    def attempt(self, action: Callable[[], None], point: str | None) -> bool:
        """Do it; with a point, die there as a crash would and open again. True if it came back."""
        failpoint._PLANS.clear()
        if point is not None:
            failpoint._PLANS[point] = failpoint._Plan("raise", 1)
        try:
            action()
        except failpoint.Injected:
            failpoint._PLANS.clear()
            self.writer.close()  # a dead process lets go of its lock, and does nothing else
            self.open()
            return False
        finally:
            failpoint._PLANS.clear()
        return True

    def settle(self, number: int, marks: Mapping[str, str], done: bool) -> None:
        """An entry that was not acknowledged is in the log whole or not at all; the log itself says which."""
        if done or self.writer.progress().end >= 100 * number + 10:
            if number > (self.model[-1] if self.model else 0):
                self.model.append(number)
                self.marks.update(marks)
        else:
            self.sent = number - 1

    @rule(size=st.integers(0, 4), marked=st.booleans(), point=st.none() | POINTS)
    def append(self, size: int, marked: bool, point: str | None) -> None:
        self.sent += 1
        number = self.sent
        marks = {"newest": str(number)} if marked else {}
        entry = Entry(rows(100 * number, *range(size + 1)), Lsn(100 * number + 10), marks)
        self.settle(number, marks, self.attempt(lambda: self.writer.append(entry), point))

    @rule(parts=st.integers(1, 3), point=st.none() | POINTS)
    def spool(self, parts: int, point: str | None) -> None:
        self.sent += 1
        number = self.sent

        def run() -> None:
            spool = self.writer.spool()
            for _ in range(parts):
                spool.write(rows(100 * number, 1))
            spool.publish(Lsn(100 * number + 10))

        self.settle(number, {}, self.attempt(run, point))

    @rule(back=st.integers(1, 5))
    def repeat(self, back: int) -> None:
        if self.model:
            number = self.model[-min(back, len(self.model))]
            self.writer.append(Entry(rows(100 * number, 1), Lsn(100 * number + 10)))

    @rule(point=st.none() | POINTS)
    def maintain(self, point: str | None) -> None:
        self.attempt(self.writer.maintain, point)

    @rule()
    def restart(self) -> None:
        self.writer.close()
        self.open()

    @invariant()
    def the_log_equals_the_model(self) -> None:
        if not hasattr(self, "root"):
            return
        reader = self.reader()
        assert list(dict.fromkeys(commits(read_all(reader)))) == [100 * number for number in self.model]
        assert [piece.end for piece in reader.read(reader.start())] == [100 * number + 10 for number in self.model]
        assert dict(self.writer.progress().marks) == self.marks
        middle = Offset(str(len(self.model) // 2))
        rest = pa.concat_tables([rows(1), *(piece.rows for piece in reader.read(middle))])
        assert set(commits(rest)) == {100 * number for number in self.model[len(self.model) // 2 :]}

    def teardown(self) -> None:
        failpoint._PLANS.clear()
        if hasattr(self, "root"):
            self.writer.close()
            shutil.rmtree(self.root, ignore_errors=True)


TestAnyHistory = LogMachine.TestCase
TestAnyHistory.settings = settings(
    max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
