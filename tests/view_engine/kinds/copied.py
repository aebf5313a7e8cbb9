"""A view that is a copy of one table."""

from typing import Literal

from cdc.config.settings import TableField, ViewSettings


class CopiedSettings(ViewSettings):
    """A copy of `source`."""

    kind: Literal["copied"] = "copied"
    source: TableField
    fail: Literal["", "transient", "final"] = ""
    """Fails in each step."""
    tick_seconds: float = 0.0


SETTINGS = CopiedSettings
