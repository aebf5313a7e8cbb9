"""Spares a process what it has no use for: a large module, and the collector's look at millions of short-lived frames.

Arrow loads pandas, where it is installed, at the first array that it makes: 40 MB and half a second of every start.
"""

import gc
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Refusal(MetaPathFinder):
    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._module:
            raise ModuleNotFoundError(f"{fullname} is not wanted in this process", name=fullname)
        return None


def do_without(module: str) -> None:
    """From now on, importing this module fails as if it were not installed. One that is loaded already stays."""
    sys.meta_path.insert(0, _Refusal(module))


_COLLECT_AFTER = 100_000


def collect_rarely() -> None:
    """Leave alone what is loaded by now, and look for cycles only once so many objects more are alive than before.

    Every message off a socket is an object that the collector follows, and thousands are held until they are decoded:
    with Python's own threshold (700) it took half the CPU of reading them, and never found any garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 10, 10)
