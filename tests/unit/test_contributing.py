"""CONTRIBUTING.md names paths and make targets that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
GENERATED = (".venv/", "build/")
ROW = re.compile(r"^\| `([a-z_/]+/)` \| (.+) \|$", re.MULTILINE)


def paths() -> set[str]:
    """Texts in backticks that contain a folder or name a file of the root."""
    quoted = set(re.findall(r"`(\.?[\w./-]+)`", PAGE))
    return {text for text in quoted if "/" in text.rstrip("/") or text.endswith((".md", ".yaml"))}


def test_every_path_exists() -> None:
    found = {path for path in paths() if not path.startswith(GENERATED)}
    assert len(found) > 30
    assert sorted(path for path in found if not (ROOT / path).exists()) == []


def test_every_subfolder_of_the_tour_exists() -> None:
    """A row of the tour names them without the folder that they are in."""
    named = [f"{folder}{name}" for folder, text in ROW.findall(PAGE) for name in re.findall(r"`([\w]+/)`", text)]
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).is_dir()] == []


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]*[a-z])`", PAGE))
    assert named - targets == set()
