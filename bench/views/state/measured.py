"""What a contender of the bake-off is asked, and what it answers."""

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from bench.cpu_meter import peak_rss_mb, tree, tree_cpu

PARTITIONS = 2
"""Of the state, of every contender: Spark fixes the number with the first checkpoint."""
COLUMNS = {
    "totals": ("key", "sum", "count"),
    "pairs": ("order_id", "item_id", "order_value", "item_value", "live"),
}
"""The columns of what each job emits. A total with count 0, and a pair with live 0, are gone."""

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """`folder` has the batches; `home` the state, where a later process goes on. With `keep` the emitted rows are
    returned. `warm` names a folder of a few batches that are processed first, with a state of their own, and not
    measured; with it, the state is read and measured at the end. `erase` is a key to erase then (0: none)."""

    contender: str
    job: str
    folder: str
    home: str
    cores: int = 2
    keep: bool = False
    warm: str = ""
    erase: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a batch; CPU is that of this process and all its descendants."""

    monotonic: float
    cpu: float

    @classmethod
    def now(cls) -> "Mark":
        """Both clocks."""
        return cls(time.monotonic(), tree_cpu(os.getpid()))

    def since(self, earlier: "Mark") -> Figures:
        """Seconds and CPU seconds between two marks."""
        return {
            "seconds": round(self.monotonic - earlier.monotonic, 3),
            "cpu_seconds": round(self.cpu - earlier.cpu, 3),
        }


def answer(start: Mark, marks: list[Mark], kept: list[Figures], state: Figures) -> Figures:
    """As JSON for the parent."""
    resident = sum(peak_rss_mb(pid) for pid in tree(os.getpid()))
    each = [asdict(mark) for mark in marks]
    return {"start": asdict(start), "marks": each, "kept": kept, "state": state, "peak_rss_mb": round(resident)}
