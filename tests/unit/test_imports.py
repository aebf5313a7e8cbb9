"""Imports point one way: toward cdc/model.py."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

LEVELS = [
    ["cdc.arrays", "cdc.backoff"],
    ["cdc.model", "cdc.errors", "cdc.config.secret", "cdc.config.loopback", "cdc.key_range", "cdc.row_file"],
    ["cdc.json_text", "cdc.durable_files", "cdc.discovery", "cdc.failpoint", "cdc.clock"],
    ["cdc.ports", "cdc.config", "cdc.log_output", "cdc.client"],
    ["cdc.capture", "cdc.log", "cdc.artifacts"],
    ["snapshots", "sinks", "views"],
    ["cdc.service"],
    ["cdc.cli"],
    ["deploy"],
]
DELTA_COMMAND = "cdc.service.inspect.fresh"  # `millrace fresh` reads a Delta table and nothing else
STORES = ("sinks.delta", "sinks.opensearch", "sinks.redis")
OURS = ("cdc", "sinks", "snapshots", "views", "deploy")


def unit_of(module: str) -> str | None:
    """The row of LEVELS that a module belongs to."""
    units = [unit for level in LEVELS for unit in level]
    return next((unit for unit in units if module == unit or module.startswith(unit + ".")), None)


def level_of(unit: str) -> int:
    return next(index for index, level in enumerate(LEVELS) if unit in level)


def modules() -> Iterator[tuple[str, Path]]:
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_imports(module: str, path: Path) -> Iterator[str]:
    here = unit_of(module)
    if here is None:
        return
    for target in imports(path):
        there = unit_of(target)
        if there is None or there == here or target.split(".")[0] not in OURS:
            continue
        same_level = level_of(there) == level_of(here)
        if level_of(there) > level_of(here) or (same_level and level_of(here) >= 4 and here != "views"):
            yield f"{module} imports {target}"


def test_imports_point_toward_the_model() -> None:
    wrong = sorted({line for module, path in modules() for line in wrong_imports(module, path)})
    assert wrong == []


def test_no_store_is_known_outside_its_package() -> None:
    """A store's package imports no other store's, and generic code finds stores by `sinks.registry`."""
    known = sorted(
        {
            f"{module} imports {store}"
            for module, path in modules()
            for store in STORES
            for target in imports(path)
            if module != DELTA_COMMAND
            and f"{target}.".startswith(f"{store}.")
            and not f"{module}.".startswith(f"{store}.")
        }
    )
    assert known == []


def test_every_module_has_a_level() -> None:
    packages = {"cdc", "deploy"}
    assert [module for module, _ in modules() if unit_of(module) is None and module not in packages] == []


def test_the_walk_notices_a_wrong_direction(tmp_path: Path) -> None:
    offender = tmp_path / "offender.py"
    offender.write_text("from cdc.cli import main\n", encoding="utf-8")
    assert list(wrong_imports("cdc.capture.replication.connection", offender)) == [
        "cdc.capture.replication.connection imports cdc.cli",
        "cdc.capture.replication.connection imports cdc.cli.main",
    ]
