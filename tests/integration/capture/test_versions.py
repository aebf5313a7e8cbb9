"""Every version of PostgreSQL that is supported: the same history ends equal, whatever protocol the server speaks."""

import subprocess

import pytest

from cdc.artifacts.progress import silent
from cdc.capture.source import doctor
from cdc.capture.source.doctor import Verdict
from deploy.local import postgres, postgres_versions
from tests.fix_capture import MakeRig
from tests.fix_servers import Database

TABLES = (
    "create table items (id int primary key, label text, amount numeric, at timestamp, doc jsonb, tags text[],"
    " big text)",
    "alter table items alter column big set storage external",
    "create table events (id int, at date, what text, primary key (id, at)) partition by range (at)",
    "create table events_1 partition of events for values from ('2026-01-01') to ('2027-01-01')",
    "create table whole (a int, b text)",
    "alter table whole replica identity full",
)
LARGE = "(select string_agg(md5((g * id)::text), '') from generate_series(1, 200) g)"


@pytest.mark.parametrize("version", postgres_versions.VERSIONS)
def test_a_history_of_everything_ends_equal(
    private_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    folder = postgres_versions.binaries(version, silent)
    monkeypatch.setattr(postgres, "_system_folders", lambda: [folder])
    told = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    assert f"(PostgreSQL) {version}." in told
    rig = private_rig({"logical_decoding_work_mem": "64kB", "max_prepared_transactions": "5"})
    server = rig.database.server
    rig.capture_tables(
        *TABLES,
        "insert into items select g, 'snapshot', g / 7.0, now(), '{\"a\": [1, 2]}', '{a,b}', 'x'"
        " from generate_series(1, 50) g",
        snapshot="initial",
    )
    assert [found.object for found in doctor.examine(rig.settings.source) if found.verdict is Verdict.FAIL] == []
    rig.begin()
    with rig.following() as following:
        _history(rig.database)
        following.reaches(rig.now())
        server.stop("immediate")
        server.start()
        rig.database.execute("update items set label = 'after the crash' where id = 1")
        following.reaches(rig.now())
    rig.assert_equal("public.items", "public.events", "public.whole")
    rig.assert_once_in_order()
    assert not [row for row in rig.rows() if (row["after"] or "").find("rolled back") >= 0]


def _history(database: Database) -> None:
    database.execute(
        "insert into items (id, label) values (100, 'new'), (101, 'new')",
        f"update items set big = {LARGE} where id <= 5",
        "update items set label = 'large column not sent' where id <= 5",
        "update items set id = id + 1000 where id = 101",
        "delete from items where id between 10 and 15",
        "insert into events values (1, '2026-01-05', 'a'), (2, '2026-05-06', 'b')",
        "update events set at = '2026-07-07' where id = 2",
        "insert into whole values (1, 'x'), (2, null), (3, 'y')",
        "update whole set b = 'z' where a = 1",
        "delete from whole where a = 3",
        "begin; insert into items (id, label) values (300, 'rolled back'); rollback",
        "begin; insert into items (id, label) values (301, 'prepared'); prepare transaction 'one'",
        "commit prepared 'one'",
    )
    with database.connect(autocommit=False) as writer:  # large enough to be streamed while it is open
        writer.execute("insert into items (id, label) select g, 'streamed' from generate_series(2000, 5000) g")
        writer.execute("savepoint a")
        writer.execute("insert into items (id, label) select g, 'rolled back' from generate_series(6000, 8000) g")
        writer.execute("rollback to savepoint a")
        writer.execute("alter table items add column more int default 7")
        writer.execute("update items set label = 'streamed twice' where id between 2000 and 2100")
        writer.commit()
    # A column that is added gives no change to the rows that have it by default: touched, they say so.
    database.execute(
        "update items set label = label || '.'", "truncate events", "insert into events values (9, '2026-02-02', 'c')"
    )
