"""Connections to the source: encrypted and checked unless they stay on the machine, pinned whatever the role says."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from cdc.capture.source.connect import brief, connect, explained, parameters
from cdc.config.secret import Secret
from cdc.config.settings import SourceSettings
from cdc.errors import SourceLost, SourceRefused
from tests.fix_capture import Rig
from tests.fix_proxy import MakeProxy
from tests.fix_servers import Database, MakePostgres, PostgresServer


def test_any_host_but_loopback_is_verified_unless_told_otherwise() -> None:
    assert parameters(SourceSettings(host="db.example.com"))["sslmode"] == "verify-full"
    assert parameters(SourceSettings(host="10.0.0.1"))["sslmode"] == "verify-full"
    assert parameters(SourceSettings(host="127.0.0.1"))["sslmode"] == "prefer"
    assert parameters(SourceSettings(host="/run/postgresql"))["sslmode"] == "prefer"
    assert parameters(SourceSettings(host="db.example.com", sslmode="require"))["sslmode"] == "require"


def test_a_role_with_settings_of_its_own_still_sends_the_same_text(rig: Rig) -> None:
    role = rig.database.name + "_role"
    rig.capture_tables(
        "create table items (id int primary key, at timestamptz, d date, i interval, f float8, b bytea)",
        "insert into items values (1, '2026-01-31 10:00+02', '2026-01-31', '1 day 02:00', 0.1, '\\xff')",
        f"create role {role} login superuser password 'a-long-password'",
        f"alter role {role} set datestyle = 'German'",
        f"alter role {role} set timezone = 'Asia/Tokyo'",
        f"alter role {role} set intervalstyle = 'iso_8601'",
        f"alter role {role} set extra_float_digits = -15",
        f"alter role {role} set bytea_output = 'escape'",
        f"alter role {role} set statement_timeout = '1ms'",
        snapshot="initial",
        user=role,
        password="a-long-password",
    )
    try:
        rig.begin()
        rig.follow("update items set id = 2")
        read, _, written = rig.rows("public.items")
        assert read["after"].replace('"id":1', '"id":2') == written["after"]
        assert '"2026-01-31T08:00:00Z"' in read["after"] and '"2026-01-31"' in read["after"]
    finally:
        rig.database.execute(f"reassign owned by {role} to postgres", f"drop role {role}")


class _Authority:
    """A certificate authority and a server that shows one of its certificates."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.root = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(str(self.root))

    def dress(self, server: PostgresServer, name: str) -> None:
        """Give the server a certificate for that name, and restart it."""
        issued = self.ca.issue_cert(name)
        cluster = next(server.data.rglob("PG_VERSION")).parent
        owner = cluster.stat()
        for file, pem in (("server.crt", issued.cert_chain_pems[0]), ("server.key", issued.private_key_pem)):
            path = cluster / file
            path.unlink(missing_ok=True)
            path.write_bytes(pem.bytes())
            path.chmod(0o600)
            with contextlib.suppress(PermissionError):
                os.chown(path, owner.st_uid, owner.st_gid)
        server.execute("alter system set ssl = on")
        server.restart()


@pytest.fixture
def authority(tmp_path: Path) -> _Authority:
    return _Authority(tmp_path)


def _source(server: PostgresServer, **settings: object) -> SourceSettings:
    return SourceSettings.model_validate(
        {"host": "localhost", "port": server.port, "user": "postgres", "password": server.password, **settings}
    )


def test_certificates_decide_whether_a_server_is_spoken_to(
    private_postgres: MakePostgres, authority: _Authority, tmp_path: Path, make_rig: Callable[[Database], Rig]
) -> None:
    server = private_postgres()
    checked = {"sslmode": "verify-full", "sslrootcert": str(authority.root)}
    with pytest.raises(SourceRefused), connect(_source(server, **checked)):
        pass  # a plain server
    authority.dress(server, "localhost")
    with connect(_source(server, **checked)) as connection:
        assert connection.pgconn.ssl_in_use
    stranger = _Authority(_made(tmp_path / "stranger"))
    with pytest.raises(SourceRefused), connect(_source(server, sslmode="verify-full", sslrootcert=str(stranger.root))):
        pass  # an unknown authority
    rig = make_rig(Database(server, "postgres"))
    rig.source.update(checked, host="localhost")
    rig.capture_tables("create table items (id int primary key, label text)")
    rig.begin()
    # More than one TLS record, some of which end inside a message.
    rig.follow("insert into items select g, repeat('x', g % 9000) from generate_series(1, 2000) g")
    rig.assert_equal()
    authority.dress(server, "elsewhere.example.com")
    with pytest.raises(SourceRefused), connect(_source(server, **checked)):
        pass  # the wrong name


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_server_that_is_not_there_is_worth_trying_again(unused_port: int) -> None:
    source = SourceSettings(port=unused_port, password=Secret("MARKER"))
    with pytest.raises(SourceLost) as raised, connect(source):
        pass
    assert "MARKER" not in str(raised.value) and str(unused_port) in str(raised.value)


def test_a_question_to_a_stalled_server_is_given_up(rig: Rig, proxy: MakeProxy) -> None:
    way = proxy(rig.source["port"])
    rig.source["port"] = way.port
    with (
        pytest.raises(SourceLost),
        brief(rig.settings.source, seconds=1.0) as connection,
        explained("Asking"),
    ):
        way.stall()
        connection.execute("select 1")


def test_a_quick_question_is_answered_and_nothing_is_cut(rig: Rig) -> None:
    with brief(rig.settings.source, seconds=30.0) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


@pytest.fixture
def unused_port() -> Iterator[int]:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
