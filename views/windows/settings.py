"""The settings of windows."""

from typing import Literal

from pydantic import Field, model_validator

from cdc.config.settings import Section, TableField, ViewSettings
from views.time.duration import Duration
from views.time.emit import Emit


class WindowSettings(Section):
    """The form of the windows; name exactly one of them. `every` belongs to `hopping`."""

    tumbling: Duration | None = None
    """Windows of this size, one after the other."""
    hopping: Duration | None = None
    """Windows of this size, of which one begins every `every`. They overlap, or leave gaps if `every` is larger."""
    every: Duration | None = None
    """The distance between the beginnings of hopping windows."""
    sliding: Duration | None = None
    """For each row, the rows of the time of this size before it."""
    session: Duration | None = None
    """Rows that follow each other by less than this gap."""
    all: bool = False
    """One window for all time."""

    @model_validator(mode="after")
    def _one_form(self) -> "WindowSettings":
        named = [name for name in ("tumbling", "hopping", "sliding", "session") if getattr(self, name) is not None]
        if len(named) + self.all != 1:
            raise ValueError("name one of tumbling, hopping, sliding, session and all")
        if (self.hopping is None) != (self.every is None):
            raise ValueError("`every` goes with `hopping`, which needs it")
        if any(getattr(self, name) == 0 for name in (*named, *(["every"] if self.every is not None else []))):
            raise ValueError("a window must be longer than nothing")
        return self


class WindowedSettings(ViewSettings):
    """Aggregates of one table's rows by windows of event time."""

    kind: Literal["windows"] = "windows"
    source: TableField
    """The table whose rows are events, as schema.name."""
    where: str = ""
    """Only rows that meet this condition."""
    time: str = ""
    """The event time: a column or an expression of type timestamptz or timestamp. Empty: the time of the commit."""
    lateness: Duration = 0
    """How far behind the greatest event time a row may come and still be in time."""
    late: Literal["correct", "drop"] = "correct"
    """A row that comes after its window has closed: it corrects the window's row, or it is dropped and counted."""
    correct_for: Duration = Field(86_400_000_000, validate_default=False)
    """How long after its close a window is still corrected; later rows are dropped and counted."""
    idle: Duration = 0
    """While no row comes for so long, time passes by the clock of the capture process. 0: it stands still."""
    window: WindowSettings
    """The form of the windows."""
    group_by: dict[str, str] = Field(default_factory=dict)
    """Columns of the result by which rows are grouped: names and expressions."""
    compute: dict[str, str]
    """Columns of the result that are computed: names and aggregates."""
    emit: Emit = "change"
    """When the row of a window is emitted: at every change, once when it closes (and when it is corrected), or both."""
    tick_seconds: float = Field(0.0, ge=0)
    """How often the log gets the time while `idle` is set; 0: every second."""

    @model_validator(mode="after")
    def _ticks(self) -> "WindowedSettings":
        if self.idle and not self.tick_seconds:
            object.__setattr__(self, "tick_seconds", 1.0)
        return self
