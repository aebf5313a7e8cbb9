"""Keeps a large module out of a process that has no use for it.

Arrow loads pandas, where it is installed, at the first array that it makes: 40 MB and half a second of every start.
"""

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
