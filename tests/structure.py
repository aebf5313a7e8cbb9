"""The structure of the product in figures: modules per folder, modules with one importer, duplicate class names.

`python -m tests.structure [CHECKOUT]` prints them for this tree or another checkout; `git worktree add --detach FOLDER
REVISION` makes one to compare with. It reads the sources and imports nothing.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("cdc", "sinks", "snapshots", "views", "pyspark_millrace", "deploy")
FULL_FOLDER = 12
"""Modules in a folder. A reader takes in about a dozen names at a glance."""
PLUGIN_CONSTANTS = frozenset({"SETTINGS", "KIND"})
"""A module that assigns one is found by cdc.discovery: a kind of sink or of log."""
PLUGIN_FUNCTION = "open_sink"
COMMAND_FOLDERS = frozenset({"cli", "commands"})
LIBRARIES = frozenset({"cdc.client", "pyspark_millrace"})
"""Modules for programs of users."""


@dataclass(frozen=True, slots=True)
class Module:
    """One source file; `imports` are the dotted names that it imports, modules and members alike."""

    name: str
    folder: str
    imports: frozenset[str]
    classes: tuple[str, ...]
    entry_point: bool
    """A plug-in, a command, a program or a library: importers inside the product say nothing about it."""


def modules(root: Path = ROOT) -> Iterator[Module]:
    """Every module of the product in a checkout, without `__init__.py` files that have no code."""
    for top in PACKAGES:
        for path in sorted((root / top).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if path.name != "__init__.py" or len(tree.body) > 1:
                yield _module(path.relative_to(root), tree, _imports_its_modules(path.parent / "__init__.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a source imports, at the top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(path: Path, tree: ast.Module, plug_in: bool) -> Module:
    parts = path.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    classes = tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    entry_point = plug_in or name in LIBRARIES or bool(COMMAND_FOLDERS.intersection(parts))
    entry_point = entry_point or any(map(_makes_entry_point, tree.body))
    return Module(name, path.parent.as_posix(), frozenset(imports(tree)), classes, entry_point)


def _imports_its_modules(package: Path) -> bool:
    """Whether a package imports whatever modules it has, as that of the types does."""
    return package.exists() and "iter_modules(__path__)" in package.read_text(encoding="utf-8")


def _makes_entry_point(statement: ast.stmt) -> bool:
    """Whether it is a plug-in's constant or function, or `if __name__ == "__main__":`."""
    if isinstance(statement, ast.FunctionDef):
        return statement.name == PLUGIN_FUNCTION
    if isinstance(statement, ast.If):
        return "__main__" in ast.unparse(statement.test)
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(isinstance(target, ast.Name) and target.id in PLUGIN_CONSTANTS for target in targets)


def folder_sizes(root: Path = ROOT) -> Mapping[str, int]:
    """Modules per folder, the fullest first."""
    counts = Counter(module.folder for module in modules(root))
    return dict(sorted(counts.items(), key=lambda found: (-found[1], found[0])))


def importers(root: Path = ROOT) -> Mapping[str, list[str]]:
    """The modules of the product that import each module, without entry points."""
    found = list(modules(root))
    return {
        module.name: [other.name for other in found if module.name in other.imports and other.name != module.name]
        for module in found
        if not module.entry_point
    }


def duplicate_classes(root: Path = ROOT) -> Mapping[str, list[str]]:
    """Names of top-level classes that several modules define, with those modules."""
    defined: dict[str, list[str]] = defaultdict(list)
    for module in modules(root):
        for name in module.classes:
            defined[name].append(module.name)
    return {name: where for name, where in sorted(defined.items()) if len(where) > 1}


def report(root: Path = ROOT) -> Iterator[str]:
    """The lines that the program prints."""
    sizes, imported, duplicates = folder_sizes(root), importers(root), duplicate_classes(root)
    single = {name: by[0] for name, by in imported.items() if len(by) == 1}
    unused = [name for name, by in imported.items() if not by]
    full = [folder for folder, count in sizes.items() if count > FULL_FOLDER]
    yield f"{sum(sizes.values())} modules in {len(sizes)} folders; {len(full)} folder(s) have more than {FULL_FOLDER}"
    yield from (f"  {count:3} {folder}{'  <-- full' * (folder in full)}" for folder, count in sizes.items())
    yield f"{len(single)} modules have one importer"
    yield from (f"  {name} <- {by}" for name, by in single.items())
    yield f"{len(unused)} modules have no importer and are no entry points"
    yield from (f"  {name}" for name in unused)
    yield f"{len(duplicates)} class names are used by several modules"
    yield from (f"  {name}: {', '.join(where)}" for name, where in duplicates.items())


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)))
