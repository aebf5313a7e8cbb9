"""An S3 server for tests, whose buckets are folders: started when the first test of the session asks."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.cluster import s3
from deploy.local.cluster.s3 import S3
from deploy.local.servers import Servers
from tests.fix_servers import LocalServer, unique


class S3Server(LocalServer):
    """The server under test; `.url` is its endpoint."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers, "s3")

    @property
    def storage_options(self) -> dict[str, str]:
        """What `deltalake` needs to reach it."""
        return s3.storage_options(self.url, self._servers.private())


@pytest.fixture(scope="session")
def shared_s3(session_home: Path) -> Iterator[S3Server]:
    """Not for tests: see `s3_server`."""
    session_home.mkdir(mode=0o711, parents=True, exist_ok=True)
    servers = Servers(session_home / "s3", {"s3": S3()}, tied=True)
    yield S3Server(servers)
    servers.down()
    shutil.rmtree(session_home / "s3", ignore_errors=True)


@pytest.fixture
def s3_server(shared_s3: S3Server) -> S3Server:
    """The session's S3 server, running."""
    shared_s3.start()
    return shared_s3


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    """A prefix of the test's own in the server's bucket: `s3://…`."""
    return f"s3://{s3.BUCKET}/{unique('test')}"
