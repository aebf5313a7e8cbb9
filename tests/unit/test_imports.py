"""Imports point one way: toward cdc/model.py."""

import ast
from collections.abc import Iterator

from tests.structure import PACKAGES, Module, imports, modules

LEVELS = [
    ["cdc.arrays", "cdc.backoff"],
    ["cdc.model", "cdc.errors", "cdc.config.secret", "cdc.config.loopback", "cdc.key_range", "cdc.row_file"],
    [
        "cdc.json_text",
        "cdc.durable_files",
        "cdc.discovery",
        "cdc.failpoint",
        "cdc.fence",
        "cdc.clock",
        "cdc.expressions",
        "cdc.object_store",
    ],
    ["cdc.ports", "cdc.config", "cdc.log_output", "cdc.client"],
    ["cdc.capture", "cdc.log", "cdc.artifacts"],
    ["snapshots", "sinks", "views"],
    ["cdc.service"],
    ["cdc.cli"],
    ["deploy", "pyspark_millrace"],
]
DELTA_READERS = (
    "cdc.service.inspect.fresh",  # `millrace fresh` reads a Delta table and nothing else
    "pyspark_millrace",  # gives a column the type that it has in Delta
)
STORES = ("sinks.delta", "sinks.opensearch", "sinks.redis")


def unit_of(module: str) -> str | None:
    """The row of LEVELS that a module belongs to."""
    units = [unit for level in LEVELS for unit in level]
    return next((unit for unit in units if module == unit or module.startswith(unit + ".")), None)


def level_of(unit: str) -> int:
    return next(index for index, level in enumerate(LEVELS) if unit in level)


def wrong_imports(module: Module) -> Iterator[str]:
    here = unit_of(module.name)
    if here is None:
        return
    for target in sorted(module.imports):
        there = unit_of(target)
        if there is None or there == here or target.split(".")[0] not in PACKAGES:
            continue
        same_level = level_of(there) == level_of(here)
        if level_of(there) > level_of(here) or (same_level and level_of(here) >= 4 and here != "views"):
            yield f"{module.name} imports {target}"


def test_imports_point_toward_the_model() -> None:
    assert [line for module in modules() for line in wrong_imports(module)] == []


def test_no_store_is_known_outside_its_package() -> None:
    """A store's package imports no other store's, and generic code finds stores by `sinks.registry`."""
    known = {
        f"{module.name} imports {store}"
        for module in modules()
        for store in STORES
        for target in module.imports
        if not (store == "sinks.delta" and module.name.startswith(DELTA_READERS))
        and f"{target}.".startswith(f"{store}.")
        and not f"{module.name}.".startswith(f"{store}.")
    }
    assert known == set()


def test_every_module_has_a_level() -> None:
    assert [module.name for module in modules() if unit_of(module.name) is None] == []


def test_a_wrong_direction_is_found() -> None:
    targets = frozenset(imports(ast.parse("from cdc.cli import main\n")))
    offender = Module("cdc.capture.replication.connection", "cdc/capture/replication", targets, (), False)
    assert list(wrong_imports(offender)) == [
        "cdc.capture.replication.connection imports cdc.cli",
        "cdc.capture.replication.connection imports cdc.cli.main",
    ]
