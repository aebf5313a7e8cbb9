"""When the row of a window is emitted."""

from typing import Literal

Emit = Literal["change", "close", "both"]
