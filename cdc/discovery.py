"""Finds the plug-in modules of a package: the kinds of log in cdc/log, the kinds of sink in sinks/."""

import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from importlib.abc import InspectLoader
from types import ModuleType


def modules_that_define(constant: str, package: ModuleType, module: str) -> Iterator[str]:
    """Names of the modules that assign `constant`: `<package>/<kind>.py`, or `<package>/<kind>/<module>.py`.

    Reads the sources instead of importing them: some modules import Spark, which costs a second.
    """
    assigns = re.compile(rf"^{constant}\b", re.MULTILINE)
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        name = f"{info.name}.{module}" if info.ispkg else info.name
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        if isinstance(loader, InspectLoader) and assigns.search(loader.get_source(name) or ""):
            yield name
