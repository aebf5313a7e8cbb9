"""Everything that doctor must find before anything is made or read, on real servers."""

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import yaml

from cdc.capture.source import publication, slot
from cdc.capture.source.connect import connect
from cdc.capture.source.doctor import Finding, Verdict, examine
from cdc.errors import SourceRefused
from tests.fix_capture import MakeRig, Rig
from tests.fix_processes import RunProgram, wait_until

ITEMS = "create table items (id int primary key, label text)"


def _failed(rig: Rig, check: str = "") -> list[Finding]:
    found = examine(rig.settings.source)
    return [item for item in found if item.verdict is Verdict.FAIL and (not check or item.check == check)]


def _finding(rig: Rig, check: str) -> Finding:
    return next(item for item in examine(rig.settings.source) if item.check == check)


@pytest.fixture
def modest(rig: Rig) -> Iterator[Rig]:
    """A pipeline with the least role of deploy/postgres, and a publication made by the owner."""
    role = rig.database.name + "_role"
    rig.capture_tables(
        ITEMS,
        f"create role {role} login replication password 'a-long-password'",
        f"grant select on items to {role}",
        "create publication millrace for table items with (publish_via_partition_root = true)",
        user=role,
        password="a-long-password",
    )
    yield rig
    rig.database.execute(f"drop owned by {role}", f"drop role {role}")


def test_the_least_role_is_enough_and_nothing_is_found_wrong(modest: Rig) -> None:
    assert _failed(modest) == []
    modest.begin()
    modest.follow("insert into items values (1, 'a')")
    modest.assert_equal()


def test_a_role_that_may_not_change_the_publication_is_told_the_statement(modest: Rig) -> None:
    with connect(modest.settings.source) as connection:
        stored = publication.ensure(connection, modest.settings.source)
    modest.database.execute(
        "create table more (id int primary key)", f"grant select on more to {modest.source['user']}"
    )
    modest.source["tables"] = ["public.more"]
    with connect(modest.settings.source) as connection, pytest.raises(SourceRefused) as raised:
        publication.update_tables(connection, modest.settings.source, stored)
    assert 'ALTER PUBLICATION "millrace" ADD TABLE ONLY "public"."more"' in raised.value.remedy
    assert 'DROP TABLE ONLY "public"."items"' in raised.value.remedy


def test_a_superuser_is_more_than_needed(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    assert _finding(rig, "role").verdict is Verdict.WARN
    assert _failed(rig) == []


def test_a_role_without_replication_is_told_what_to_run(modest: Rig) -> None:
    modest.database.execute(f"alter role {modest.source['user']} noreplication")
    found = _failed(modest, "role")[0]
    assert "REPLICATION" in found.remedy


def test_a_missing_grant_names_table_and_statement(modest: Rig) -> None:
    modest.database.execute(f"revoke select on items from {modest.source['user']}")
    found = _failed(modest, "select")[0]
    assert found.object == "public.items" and "GRANT SELECT" in found.remedy


def test_row_security_that_would_hide_rows_is_found_before_anything_is_read(modest: Rig) -> None:
    modest.database.execute("alter table items enable row level security", "insert into items values (1, 'hidden')")
    found = _failed(modest, "row_security")[0]
    assert "BYPASSRLS" in found.remedy
    with connect(modest.settings.source) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("select count(*) from items")


@pytest.mark.parametrize(
    ("table", "statement"),
    [
        ("create table items (id int)", "REPLICA IDENTITY FULL"),
        ("create table items (id int not null unique)", "USING INDEX"),
        ("create table items (id int primary key); alter table items replica identity nothing", "DEFAULT"),
    ],
)
def test_a_table_without_identity_is_refused_before_it_could_break_its_application(
    rig: Rig, table: str, statement: str
) -> None:
    rig.capture_tables(table)
    assert statement in _failed(rig, "identity")[0].remedy
    with pytest.raises(SourceRefused, match="no replica identity"):
        rig.begin()
    with connect(rig.settings.source) as connection:
        assert publication.read(connection, rig.settings.source.publication) is None
        assert slot.find(connection, rig.source["slot"]) is None
    rig.database.execute("insert into items values (1)", "update items set id = 2", "delete from items")


def test_full_identity_without_a_key_is_allowed_with_a_warning(rig: Rig) -> None:
    rig.capture_tables("create table items (id int, label text)", "alter table items replica identity full")
    assert _failed(rig) == []
    assert _finding(rig, "identity").verdict is Verdict.WARN


def test_a_column_list_that_leaves_out_the_key_is_refused(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    rig.source["tables"] = [{"name": "public.items", "columns": ["label"]}]
    assert "leaves out id" in _failed(rig, "identity")[0].message


def test_a_row_filter_outside_the_identity_is_rolled_back_before_it_could_break_its_application(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    rig.source["tables"] = [{"name": "public.items", "where": "label <> 'secret'"}]
    with pytest.raises(SourceRefused, match="row filter uses label"):
        rig.begin()
    rig.database.execute("insert into items values (1, 'a')", "update items set label = 'b'")
    with connect(rig.settings.source) as connection:
        assert publication.read(connection, rig.settings.source.publication) is None


def test_a_row_filter_over_the_key_is_published(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    rig.source["tables"] = [{"name": "public.items", "where": "id > 10", "snapshot": "never"}]
    rig.begin()
    rig.follow("insert into items values (1, 'out'), (11, 'in')")
    assert list(rig.folded("public.items")) == ['{"id":11}']


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("create publication millrace for table items with (publish = 'insert', publish_via_partition_root)", "update"),
        ("create publication millrace for table items", "publish_via_partition_root"),
        ("create publication millrace with (publish_via_partition_root)", "public.items is not in it"),
        ("create publication millrace for table items (id) with (publish_via_partition_root)", "columns (id)"),
    ],
)
def test_a_publication_that_sends_less_than_configured_is_found(rig: Rig, made: str, said: str) -> None:
    rig.capture_tables(ITEMS)
    rig.database.execute(made)
    assert any(said in found.message for found in _failed(rig, "publication"))
    with pytest.raises(SourceRefused, match="differs"):
        rig.begin()


@pytest.mark.parametrize("scope", ["for all tables", "for tables in schema public"])
def test_a_publication_without_a_list_works_with_a_warning(rig: Rig, scope: str) -> None:
    rig.capture_tables(ITEMS)
    rig.database.execute(f"create publication millrace {scope} with (publish_via_partition_root)")
    assert _failed(rig) == []
    assert any(item.check == "publication" and item.verdict is Verdict.WARN for item in examine(rig.settings.source))
    rig.begin()
    rig.follow("insert into items values (1, 'a')")
    rig.assert_equal()


def test_views_and_unlogged_and_missing_tables_are_refused_by_name(rig: Rig) -> None:
    rig.capture_tables(ITEMS, "create view v as select 1 as id", "create unlogged table u (id int primary key)")
    rig.source["tables"] = ["public.items", "public.v", "public.u", "public.nowhere"]
    said = {found.object: found.message for found in _failed(rig)}
    assert "view" in said["public.v"] and "unlogged" in said["public.u"] and "exist" in said["public.nowhere"]


def test_odd_names_are_quoted_everywhere(rig: Rig) -> None:
    odd = 'we"ird; drop table x; --%s {}'
    quoted = odd.replace('"', '""')
    rig.database.execute(
        f'create schema "{quoted}"', f'create table "{quoted}"."{quoted}" ("{quoted}" int primary key, "Größe" text)'
    )
    name = f'"{quoted}"."{quoted}"'
    rig.source["tables"] = [{"name": name, "snapshot": "never", "columns": [odd, "Größe"]}]
    rig.source["publication"] = odd
    assert _failed(rig) == []
    rig.begin()
    rig.follow(f"insert into {name} values (1, 'ü')")
    rows = rig.rows()
    assert [json.loads(row["after"]) for row in rows] == [{odd: 1, "Größe": "ü"}]


def test_a_server_that_is_not_set_up_for_logical_replication_says_setting_and_restart(private_rig: MakeRig) -> None:
    rig = private_rig({"wal_level": "replica"})
    rig.capture_tables(ITEMS)
    found = _failed(rig, "wal_level")[0]
    assert "restart" in found.remedy


def test_a_server_without_a_free_slot_names_the_setting(private_rig: MakeRig) -> None:
    rig = private_rig({"max_replication_slots": "1"})
    rig.capture_tables(ITEMS)
    rig.database.execute("select pg_create_logical_replication_slot('taken', 'pgoutput')")
    assert "max_replication_slots" in _failed(rig, "slots")[0].message
    with pytest.raises(SourceRefused, match="max_replication_slots"):
        rig.begin()


def test_a_slot_of_another_plugin_is_refused(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    try:
        rig.database.execute(f"select pg_create_logical_replication_slot('{rig.source['slot']}', 'test_decoding')")
    except psycopg.errors.UndefinedFile:
        pytest.skip("this server comes without test_decoding")
    assert "test_decoding" in _failed(rig, "slot")[0].message


def test_slot_creation_held_up_by_an_open_transaction_names_its_pid_and_times_out(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    said: list[str] = []
    with rig.database.connect(autocommit=False) as writer:
        writer.execute("insert into items values (1, 'open')")
        pid = f"pid {writer.info.backend_pid}"
        with pytest.raises(SourceRefused, match=pid), slot.create(rig.settings.source, 2.0, said.append):
            pass
        assert any(pid in text for text in said)
        senders = (
            "select count(*) from pg_stat_activity where backend_type = 'walsender' and datname = current_database()"
        )
        wait_until(lambda: rig.ask(senders) == 0, 10, "the server to give up making the slot")
    with connect(rig.settings.source) as connection:
        assert slot.find(connection, rig.source["slot"]) is None


def test_a_source_that_cannot_be_reached_is_a_finding_without_its_password(rig: Rig) -> None:
    rig.source.update(port=1, password="MARKER-secret")
    found = _failed(rig, "connection")[0]
    assert "127.0.0.1:1" in found.object
    assert "MARKER" not in str(found)


def test_a_wrong_password_is_refused_rather_than_tried_for_ever(rig: Rig) -> None:
    rig.source["password"] = "MARKER-wrong"
    with pytest.raises(SourceRefused) as raised, connect(rig.settings.source):
        pass
    assert "MARKER" not in str(raised.value)


def test_a_foreign_package_of_our_names_is_noticed(rig: Rig, tmp_path: Path, run_program: RunProgram) -> None:
    rig.capture_tables(ITEMS)
    (tmp_path / "foreign" / "snapshots").mkdir(parents=True)
    (tmp_path / "foreign" / "snapshots" / "__init__.py").touch()
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'foreign')!r});"
        "from cdc.capture.source.doctor import _installation;"
        "print([f.object for f in _installation() if f.verdict == 'fail'])"
    )
    program = run_program("-c", code)
    assert program.wait() == 0 and "['snapshots']" in program.said()


def test_the_command_prints_findings_and_fails_when_something_stands_in_the_way(
    rig: Rig, run_program: RunProgram, tmp_path: Path
) -> None:
    rig.capture_tables("create table items (id int)")
    config = tmp_path / "millrace.yaml"
    config.write_text(yaml.safe_dump({"state": str(rig.state), "source": rig.source}))
    code = "import typer; from cdc.cli.setup.doctor import doctor; app = typer.Typer(); app.command()(doctor); app()"
    program = run_program("-c", code, "--config", str(config), "--json")
    assert program.wait() == 1
    said = json.loads(program.output.read_text())
    assert said["ok"] is False and any(item["check"] == "identity" for item in said["findings"])
    rig.database.execute("alter table items add primary key (id)")
    program = run_program("-c", code, "--config", str(config))
    assert program.wait() == 0 and "public.items" in program.said()
