"""What is asked of each server version."""

import pytest

from cdc.capture.replication.connection import protocol


@pytest.mark.parametrize(("server", "version"), [(140_000, "2"), (150_018, "3"), (160_014, "4"), (180_004, "4")])
def test_the_newest_protocol_that_the_server_knows_is_spoken(server: int, version: str) -> None:
    assert protocol(server) == {"proto_version": version, "streaming": "on", "messages": "true"}
