"""The tree stays readable: small folders, one meaning per class name, no module without a use."""

from pathlib import Path

from tests.structure import duplicate_classes, folder_sizes, importers, report

LARGEST_FOLDER = 13
SAME_NAME = {
    "Decoded": "the result of a decoder: of pgoutput messages, of Kafka records. No module uses both.",
}
"""Public class names that several modules may define, and why."""


def test_no_folder_has_too_many_modules() -> None:
    assert {folder: count for folder, count in folder_sizes().items() if count > LARGEST_FOLDER} == {}


def test_a_public_class_name_has_one_meaning_in_the_product() -> None:
    """deploy/ may reuse names: the product imports nothing from it."""
    product = {
        name: [module for module in modules if not module.startswith("deploy.")]
        for name, modules in duplicate_classes().items()
        if not name.startswith("_") and name not in SAME_NAME
    }
    assert {name: modules for name, modules in product.items() if len(modules) > 1} == {}


def test_every_module_is_imported_or_is_an_entry_point() -> None:
    assert [name for name, found in importers().items() if not found] == []


def test_the_report_counts_another_checkout(tmp_path: Path) -> None:
    files = {
        "sinks/paper/__init__.py": '"""A kind of sink."""\n',
        "sinks/paper/sink.py": "from sinks.paper.ink import Ink\n\nSETTINGS = Ink\n",
        "sinks/paper/ink.py": "class Ink: ...\n",
        "cdc/cli/write.py": "def write():\n    import cdc.pen\n",
        "cdc/pen.py": "class Ink: ...\n",
        "cdc/unused.py": "NOTHING = 1\n",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    assert list(report(tmp_path)) == [
        "5 modules in 3 folders; 0 folder(s) have more than 12",
        "    2 cdc",
        "    2 sinks/paper",
        "    1 cdc/cli",
        "2 modules have one importer",
        "  cdc.pen <- cdc.cli.write",
        "  sinks.paper.ink <- sinks.paper.sink",
        "1 modules have no importer and are no entry points",
        "  cdc.unused",
        "1 class names are used by several modules",
        "  Ink: cdc.pen, sinks.paper.ink",
    ]
