"""What we install is what was looked at: pinned, hashed, and nothing is fetched when a pipeline starts."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")


def pinned() -> dict[str, str]:
    """Each requirement of the lock with what follows it."""
    parts = re.split(r"^([a-z0-9][\w.\-]*)==", LOCK, flags=re.MULTILINE | re.IGNORECASE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_requirement_is_pinned_and_hashed() -> None:
    assert len(pinned()) > 50
    assert [name for name, rest in pinned().items() if "--hash=sha256:" not in rest] == []


def test_the_lock_names_no_place_to_fetch_from() -> None:
    assert not re.search(r"https?://|--index|--find-links| @ |^-e ", LOCK, re.MULTILINE)


def test_every_dependency_of_the_project_is_in_the_lock() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {_plain(re.split(r"[\[<>=!~; ]", item)[0]) for item in wanted}
    assert names - {_plain(name) for name in pinned()} == set()


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_spark_is_never_told_to_fetch_packages() -> None:
    sources = [path for top in ("cdc", "sinks", "snapshots", "views", "deploy") for path in (ROOT / top).rglob("*.py")]
    found = [str(path) for path in sources if "spark.jars.packages" in path.read_text(encoding="utf-8")]
    assert found == []


def test_nothing_of_ours_evaluates_what_it_reads() -> None:
    """No pickle, no eval, no unsafe YAML outside what Spark itself does with our own functions."""
    forbidden = re.compile(r"\bpickle\.loads?|\byaml\.load\(|(?<![.\w])(eval|exec)\(|\bmarshal\.load|\bshelve\.open")
    sources = [path for top in ("cdc", "sinks", "snapshots", "views") for path in (ROOT / top).rglob("*.py")]
    assert [str(path) for path in sources if forbidden.search(path.read_text(encoding="utf-8"))] == []
