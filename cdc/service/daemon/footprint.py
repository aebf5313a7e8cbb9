"""Blocks the import of pandas and raises the thresholds of the garbage collector.

Arrow imports pandas, if it is installed, with its first array: 40 MB and half a second at every start.
"""

import gc
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Blocker(MetaPathFinder):
    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._module:
            raise ModuleNotFoundError(f"{fullname} is blocked in this process", name=fullname)
        return None


def block_import(module: str) -> None:
    """From now on, importing this module fails as if it were not installed. An import that was done stays."""
    sys.meta_path.insert(0, _Blocker(module))


_COLLECT_AFTER = 100_000


def collect_rarely() -> None:
    """Exclude everything loaded so far from collection, and collect only after 100,000 more objects.

    Each message from a socket is an object that the collector tracks, and thousands are kept until they are decoded.
    With Python's default threshold (700) the collector took half the CPU time of reading them and never found any
    garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 10, 10)
