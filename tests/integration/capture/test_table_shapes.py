"""Every shape of table: what can be captured is, under one key; what cannot is refused and leaves nothing behind.

Whatever becomes of a start, every UPDATE and DELETE that worked before it works after it.
"""

import json
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

import cdc.log
from cdc.artifacts.progress import silent
from cdc.capture.source import doctor, publication, slot
from cdc.capture.source.connect import connect
from cdc.capture.source.doctor import Verdict
from cdc.errors import SourceRefused
from cdc.service.capture import process
from cdc.service.capture.status import CaptureStatus
from deploy.local import postgres, postgres_versions
from snapshots.initial import snapshot
from tests.fix_capture import MakeRig, Rig

FULL = "alter table t replica identity full"
BY_INDEX = "alter table t replica identity using index i"
TO_FULL = 'ALTER TABLE "public"."t" REPLICA IDENTITY FULL'
TO_DEFAULT = 'ALTER TABLE "public"."t" REPLICA IDENTITY DEFAULT'
LEAF = "create table leaf partition of t for values from (0) to (1000)"
LEAF_TO_FULL = 'ALTER TABLE "public"."leaf" REPLICA IDENTITY FULL'
LEAF_TO_DEFAULT = 'ALTER TABLE "public"."leaf" REPLICA IDENTITY DEFAULT'


@dataclass(frozen=True, slots=True)
class Shape:
    """A table `t` with a column `v`. `remedy` is the statement that a refusal names; empty: it is captured."""

    statements: tuple[str, ...]
    key: tuple[str, ...] = ()
    remedy: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    from_18: str = ""
    """The remedy on PostgreSQL 18, where it differs."""


def partitioned(columns: str, *statements: str) -> tuple[str, ...]:
    return (f"create table t ({columns}) partition by range (id)", LEAF, *statements)


SHAPES = {
    "a key": Shape(("create table t (id int primary key, v text)",), ("id",)),
    "a key whose index is in another order": Shape(
        ("create table t (id int, v text, tenant int, primary key (tenant, id))",), ("id", "tenant")
    ),
    "a key that includes a column": Shape(("create table t (id int, v text, primary key (id) include (v))",), ("id",)),
    "a key that includes a column, under full identity": Shape(
        ("create table t (id int, v text, primary key (id) include (v))", FULL), ("id",)
    ),
    "an identity index that includes a column": Shape(
        ("create table t (id int not null, v text)", "create unique index i on t (id) include (v)", BY_INDEX), ("id",)
    ),
    "an identity index beside the key": Shape(
        (
            "create table t (id int primary key, code int not null, v text)",
            "create unique index i on t (code)",
            BY_INDEX,
        ),
        ("code",),
    ),
    "an array as key": Shape(("create table t (id int[], v text, primary key (id))",), ("id",)),
    "no key, full identity": Shape(("create table t (id int, v text)", FULL), ("id", "v")),
    "a key, full identity": Shape(("create table t (id int primary key, v text)", FULL), ("id",)),
    "a deferrable key, full identity": Shape(("create table t (id int primary key deferrable, v text)", FULL), ("id",)),
    "a generated column beside the key": Shape(
        ("create table t (id int primary key, v text, g int generated always as (id * 2) stored)",), ("id",)
    ),
    "a parent of inheritance whose child has no key": Shape(
        ("create table t (id int primary key, v text)", "create table child (w text) inherits (t)"), ("id",)
    ),
    "partitions with the root's key": Shape(partitioned("id int primary key, v text"), ("id",)),
    "a root with full identity over leaves with the same key": Shape(
        partitioned("id int primary key, v text", FULL), ("id",)
    ),
    "a leaf with full identity below a root with a key": Shape(
        partitioned("id int primary key, v text", "alter table leaf replica identity full"), ("id",)
    ),
    "a generated column, full identity": Shape(
        ("create table t (id int primary key, v text, g int generated always as (id * 2) stored)", FULL),
        ("id",),
        from_18=TO_DEFAULT,
    ),
    "no key": Shape(("create table t (id int, v text)",), remedy=TO_FULL),
    "a unique index instead of a key": Shape(
        ("create table t (id int not null, v text)", "create unique index i on t (id)"),
        remedy='ALTER TABLE "public"."t" REPLICA IDENTITY USING INDEX "i"',
    ),
    "unique indexes that could be no key": Shape(
        (
            "create table t (id int not null, n int, v text)",
            "create unique index on t (n)",
            "create unique index on t (id) where id > 5",
            "create unique index on t ((id * 2))",
        ),
        remedy=TO_FULL,
    ),
    "identity nothing": Shape(
        ("create table t (id int primary key, v text)", "alter table t replica identity nothing"), remedy=TO_DEFAULT
    ),
    "an identity index that was dropped": Shape(
        (
            "create table t (id int primary key, code int not null, v text)",
            "create unique index i on t (code)",
            BY_INDEX,
            "drop index i",
        ),
        remedy=TO_DEFAULT,
    ),
    "a deferrable key": Shape(("create table t (id int primary key deferrable, v text)",), remedy=TO_FULL),
    "a deferrable key beside a unique index": Shape(
        (
            "create table t (id int primary key deferrable, code int not null, v text)",
            "create unique index i on t (code)",
        ),
        remedy='ALTER TABLE "public"."t" REPLICA IDENTITY USING INDEX "i"',
    ),
    "a generated key": Shape(
        ("create table t (n int, v text, id int generated always as (n * 2) stored primary key)",),
        remedy=TO_FULL,
        from_18='ALTER TABLE "public"."t" ADD CONSTRAINT',
    ),
    "an identity index over a generated column": Shape(
        (
            "create table t (id int primary key, v text, g int generated always as (id * 2) stored not null)",
            "create unique index i on t (g)",
            BY_INDEX,
        ),
        remedy=TO_DEFAULT,
    ),
    "a column list under full identity": Shape(
        ("create table t (id int primary key, v text)", FULL),
        remedy=TO_DEFAULT,
        settings={"columns": ["id", "v"]},
    ),
    "a root without a key over leaves with one": Shape(
        partitioned("id int, v text", "alter table leaf add primary key (id)"),
        remedy=f"{TO_FULL}; {LEAF_TO_FULL}",
    ),
    "a root with another key than its leaf": Shape(
        partitioned(
            "id int not null, code int not null, v text",
            "alter table leaf add primary key (code)",
            "create unique index i on t (id)",
            BY_INDEX,
        ),
        remedy='ALTER TABLE "public"."leaf" REPLICA IDENTITY USING INDEX "leaf_id_idx"',
    ),
    "a root with full identity over leaves without a key": Shape(
        partitioned("id int, v text", FULL), remedy=LEAF_TO_FULL
    ),
    "a root with full identity and no key over a leaf with one": Shape(
        partitioned("id int, v text", FULL, "alter table leaf add primary key (id)"), remedy=LEAF_TO_FULL
    ),
    "leaves with full identity below a root without any": Shape(
        partitioned("id int, v text", "alter table leaf replica identity full"), remedy=TO_FULL
    ),
    "a leaf with identity nothing": Shape(
        partitioned("id int primary key, v text", "alter table leaf replica identity nothing"), remedy=LEAF_TO_DEFAULT
    ),
    "a leaf with another identity index": Shape(
        partitioned(
            "id int primary key, code int not null, v text",
            "create unique index i on leaf (code)",
            "alter table leaf replica identity using index i",
        ),
        remedy=LEAF_TO_DEFAULT,
    ),
    "a root whose key not every leaf has": Shape(
        partitioned("id int not null, v text", "alter table only t add primary key (id)"),
        remedy=f"{TO_FULL}; {LEAF_TO_FULL}",
    ),
    "a row filter that a leaf's identity does not cover": Shape(
        partitioned("id int primary key, v text", FULL),
        remedy=LEAF_TO_FULL,
        settings={"where": "v <> 'secret'"},
    ),
}
REFUSED_ONLY_AT_START = ("a row filter that a leaf's identity does not cover",)
"""Only Postgres knows which columns a condition uses: it is asked, and what it was asked by is rolled back."""
ROWS = "insert into t (id, v) select g, 'v' || g from generate_series(1, 5) g"


def use_version(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    folder = postgres_versions.binaries(version, silent)
    monkeypatch.setattr(postgres, "_system_folders", lambda: [folder])


def make(rig: Rig, shape: Shape) -> None:
    """The database anew, with this table and nothing else."""
    rig.database.execute("drop schema public cascade", "create schema public", *shape.statements)
    rig.source["tables"] = [{"name": "public.t", "snapshot": "initial", **shape.settings}]


def working(rig: Rig) -> dict[str, str]:
    """What becomes of UPDATE and DELETE of every table: nothing, or the error."""
    found = {}
    with rig.database.connect(autocommit=False) as connection:
        names = connection.execute("select tablename from pg_tables where schemaname = 'public'").fetchall()
        for (name,) in names:
            for statement in (f"update {name} set v = v || '!'", f"delete from {name}"):
                try:
                    connection.execute(statement.encode())
                    found[statement] = ""
                except psycopg.Error as error:
                    found[statement] = type(error).__name__
                connection.rollback()
    return found


def start(rig: Rig, state: Path) -> None:
    """As the process does, up to where it would begin to stream."""
    state.mkdir(mode=0o700)
    settings = rig.settings.model_copy(update={"state": state})
    stopped = threading.Event()
    stopped.set()
    with closing(cdc.log.open_writer(settings)) as log, CaptureStatus(state, "") as status:
        process.Capture(settings, log, status, stopped).run()


def left_behind(rig: Rig) -> list[str]:
    with connect(rig.settings.source) as connection:
        return [
            *(["publication"] if publication.read(connection, rig.settings.source.publication) else []),
            *(["slot"] if slot.find(connection, rig.settings.source.slot) else []),
        ]


def clean(rig: Rig) -> None:
    with connect(rig.settings.source) as connection:
        publication.drop(connection, rig.settings.source.publication)
        slot.drop(connection, rig.settings.source.slot)


def refusals(rig: Rig) -> list[str]:
    return [found.remedy for found in doctor.examine(rig.settings.source) if found.verdict is Verdict.FAIL]


def walk(rig: Rig, home: Path, shapes: dict[str, Shape], remedy_of: Callable[[Shape], str]) -> None:
    for number, (name, shape) in enumerate(shapes.items()):
        make(rig, shape)
        before = working(rig)
        assert not any(before.values()), name
        wanted = remedy_of(shape)
        if not wanted:
            assert refusals(rig) == [], name
            start(rig, home / f"state-{number}")
            assert working(rig) == before, name
            assert left_behind(rig) == ["publication", "slot"], name
            clean(rig)
            continue
        for statement in wanted.split("; "):  # what a refusal names is run, and perhaps the next one is met then
            with pytest.raises(SourceRefused) as raised:
                start(rig, home / f"{number}-{hash(statement)}")
            assert left_behind(rig) == [], name
            assert working(rig) == before, name
            assert statement in raised.value.remedy, name
            assert name in REFUSED_ONLY_AT_START or statement in " ".join(refusals(rig)), name
            if not statement.endswith("CONSTRAINT"):  # which columns to choose is for a person to know
                rig.database.execute(statement)
        if wanted.endswith("CONSTRAINT"):
            continue
        start(rig, home / f"again-{number}")
        assert working(rig) == before, name
        clean(rig)


def test_no_start_harms_an_update_or_a_delete_and_a_refused_one_leaves_nothing(rig: Rig, tmp_path: Path) -> None:
    walk(rig, tmp_path, SHAPES, lambda shape: shape.remedy)


def test_generated_columns_are_refused_where_the_server_would_refuse_the_application(
    private_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PostgreSQL 18 wants every generated column of an identity published, and fails UPDATE and DELETE otherwise."""
    use_version(monkeypatch, 18)
    shapes = {name: shape for name, shape in SHAPES.items() if "generated" in name or "partition" in name}
    walk(private_rig(), tmp_path, shapes, lambda shape: shape.from_18 or shape.remedy)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.key])
def test_snapshot_and_stream_have_one_key(rig: Rig, name: str) -> None:
    shape = SHAPES[name]
    rows = ROWS.replace("select g,", "select array[g, null, -g],") if "array" in name else ROWS
    more = [column for column in ("code", "tenant") if any(f"{column} int" in made for made in shape.statements)]
    rows = rows.replace("(id, v)", f"(id, v{''.join(', ' + column for column in more)})")
    rows = rows.replace("'v' || g", f"'v' || g{', g' * len(more)}")
    make(rig, shape)
    rig.database.execute(rows)
    rig.begin()
    rig.follow("update t set v = 'updated' where v = 'v1'", "delete from t where v = 'v2'")
    keys = {tuple(json.loads(row["key"])) for row in rig.rows("public.t")}
    assert keys == {shape.key}
    assert len(rig.folded("public.t")) == 4
    if "generated" not in name and "inheritance" not in name:
        rig.assert_equal("public.t")


def test_a_start_that_gives_up_on_its_slot_leaves_no_publication(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_SLOT_SECONDS", 0.5)
    make(rig, SHAPES["a key"])
    with rig.database.connect(autocommit=False) as writer:
        writer.execute("insert into t values (1, 'open')")
        with pytest.raises(SourceRefused, match="open transactions"):
            start(rig, tmp_path / "first")
    assert left_behind(rig) == []


def test_a_start_that_fails_in_its_snapshot_leaves_neither_slot_nor_publication(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SourceRefused("Table public.t may not be read.", "None.")

    make(rig, SHAPES["a key"])
    with monkeypatch.context() as patched, pytest.raises(SourceRefused, match="may not be read"):
        patched.setattr(snapshot, "_prepare", refuse)
        start(rig, tmp_path / "first")
    assert left_behind(rig) == []
    start(rig, tmp_path / "again")
    assert left_behind(rig) == ["publication", "slot"]


def test_a_standby_is_refused_by_name_before_anything_is_made(
    private_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From 16 on it could have a slot, but neither the publication nor a backfill's marks can be written there."""
    use_version(monkeypatch, 18)
    rig = private_rig()
    make(rig, SHAPES["a key"])
    server = rig.database.server
    server.stop()
    signal = server.data / "cluster" / "standby.signal"
    signal.touch()
    server.start()
    with pytest.raises(SourceRefused, match="this is a standby") as raised:
        start(rig, tmp_path / "first")
    assert "primary" in raised.value.remedy and left_behind(rig) == []
    server.stop()
    signal.unlink()
    server.start()
