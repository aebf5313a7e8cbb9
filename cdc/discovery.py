"""Finds the plug-in modules of a package: the kinds of log in cdc/log, the kinds of sink in sinks/."""

import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import InspectLoader
from types import ModuleType
from typing import Generic, TypeVar
from zipimport import zipimporter

T = TypeVar("T")


class Kinds(Mapping[str, T], Generic[T]):
    """What the module of each kind defines, by the kind's name. A module is imported when its kind is asked for: the
    clients of all stores and brokers would cost each command a second of CPU."""

    def __init__(self, modules: Mapping[str, str], defined: Callable[[ModuleType], T]) -> None:
        self._modules = modules
        self._defined = defined

    def __getitem__(self, kind: str) -> T:
        return self._defined(importlib.import_module(self._modules[kind]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def modules_that_define(constant: str, package: ModuleType, module: str) -> dict[str, str]:
    """Kinds and the modules that assign `constant`: `<package>/<kind>.py`, or `<package>/<kind>/<module>.py`.

    Reads the sources instead of importing them: some modules import Spark, which costs a second. The package may be in
    a zip file, as on Spark's executors.
    """
    assigns = re.compile(rf"^{constant}\b", re.MULTILINE)
    found = {}
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        name = f"{info.name}.{module}" if info.ispkg else info.name
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        if isinstance(loader, (InspectLoader, zipimporter)) and assigns.search(loader.get_source(name) or ""):
            found[info.name.rpartition(".")[2]] = name
    return found
