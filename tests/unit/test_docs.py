"""What the documentation points to exists: links, paths (also `path.py:name`), and dotted names of modules."""

import re
from pathlib import Path

import pytest

from tests.unit.test_imports import LEVELS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FOLDERS = ("cdc", "sinks", "snapshots", "views", "pyspark_millrace", "deploy", "bench", "tests")
_PATH = re.compile(rf"`((?:{'|'.join(_FOLDERS)}|docs|examples)/[\w./-]+)(?::(\w+))?`")
_DOTTED = re.compile(r"`((?:cdc|sinks|snapshots|deploy|bench)(?:\.(?!json)\w+)+)`")
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_TO_COME = {"docs/add-a-sink.md": {"sinks/jsonlines.py"}}
"""Files that a page asks its reader to make."""
_OLD_NAMES = {"CHANGELOG.md", "0021-tree-and-words.md"}
"""Pages that also name modules by what they were called."""


def text_of(page: Path) -> str:
    """Without code blocks: what stands there is an example."""
    return _CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in _LINK.findall(text_of(page)):
        target, _, anchor = link.partition("#")
        place = (page.parent / target).resolve() if target else page
        if link.startswith(("http://", "https://")):
            continue
        if not place.exists() or (anchor and anchor not in anchors(place)):
            found.append(link)
    return found


def lost_paths(page: Path) -> list[str]:
    known = _TO_COME.get(page.relative_to(ROOT).as_posix(), set())
    found = []
    for path, name in _PATH.findall(text_of(page)):
        place = ROOT / path
        if path in known or (place.exists() and (not name or defines(place, name))):
            continue
        found.append(f"{path}:{name}" if name else path)
    return found


def lost_names(page: Path) -> list[str]:
    """Dotted names that lead to no module, or to a module without what follows."""
    if page.name in _OLD_NAMES:
        return []
    return [name for name in _DOTTED.findall(text_of(page)) if not leads_somewhere(name.split("."))]


def leads_somewhere(parts: list[str]) -> bool:
    place, rest = ROOT, parts
    while rest and (place / rest[0]).is_dir():
        place, rest = place / rest[0], rest[1:]
    if rest and (place / f"{rest[0]}.py").exists():
        place, rest = place / f"{rest[0]}.py", rest[1:]
    return not rest or defines(place if place.is_file() else place / "__init__.py", rest[0])


def defines(module: Path, name: str) -> bool:
    """Whether a module has a function, method, class or constant of that name."""
    found = re.search(rf"^\s*(?:def |class )?{name}\b", module.read_text(encoding="utf-8"), re.MULTILINE)
    return found is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_everything_that_a_page_points_to_exists(page: Path) -> None:
    assert broken_links(page) + lost_paths(page) + lost_names(page) == []


def test_the_layers_of_the_architecture_are_those_that_are_checked() -> None:
    rows = re.findall(r"^\| \d \| (.+?) \|", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    shown = [set(re.findall(r"`([\w.]+)`", row)) for row in rows]
    assert shown[: len(LEVELS)] == [set(level) for level in LEVELS]


def test_every_page_that_code_names_exists() -> None:
    named = {
        page
        for folder in _FOLDERS
        for module in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", module.read_text(encoding="utf-8"))
    }
    assert sorted(page for page in named if not (ROOT / page).exists()) == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = {ROOT / "README.md"}, [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        links = {(page.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(text_of(page))}
        new = {link for link in links if link.suffix == ".md" and link.exists()} - reached
        reached |= new
        ahead += new
    assert [page for page in PAGES if page not in reached] == []
