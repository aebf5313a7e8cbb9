"""This product's packages as one zip file for Spark's executors, where they need not be installed.

The zip has the version of the driver: executors put it before what is installed there. Beside each source is its
bytecode, since Python would otherwise compile a zip's modules in every worker process. A worker with another minor
version of Python ignores the bytecode; Spark refuses such a worker anyway.
"""

import importlib
import marshal
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path

PACKAGES = ("cdc", "sinks", "snapshots", "views")
_UNCHECKED_HASH = (1).to_bytes(4, "little")
"""Flag of bytecode that is valid whatever the time of its source: a zip keeps times without their time zone."""


def write_packages(path: Path) -> Path:
    """Write the zip file, sources and data files included; returns its path."""
    with zipfile.ZipFile(path, "w") as archive:
        for package in PACKAGES:
            folder = Path(importlib.import_module(package).__path__[0])
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.suffix != ".pyc":
                    _add(archive, file, package / file.relative_to(folder))
    return path


def _add(archive: zipfile.ZipFile, file: Path, name: Path) -> None:
    content = file.read_bytes()
    archive.writestr(str(name), content)
    if file.suffix == ".py":
        module = ".".join(name.with_suffix("").parts)
        code = SourceFileLoader(module, str(file)).get_code(module)  # from __pycache__, if it is there
        compiled = MAGIC_NUMBER + _UNCHECKED_HASH + source_hash(content) + marshal.dumps(code)
        archive.writestr(str(name.with_suffix(".pyc")), compiled)
