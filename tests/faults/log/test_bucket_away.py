"""The processes of a pipeline while the bucket of its log is away for longer than requests are repeated."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

import cdc.log
from cdc.config.secret import Secret
from cdc.config.settings import Settings
from cdc.errors import LogLost
from cdc.log.segments.log import SegmentSettings
from tests.fix_log import FilledLog
from tests.fix_processes import RunProgram, wait_until
from tests.fix_proxy import MakeProxy, Proxy
from tests.fix_s3 import S3Server
from tests.fix_servers import Database
from tests.scenes.histories import labelled, table
from tests.scenes.logs_elsewhere import SETUP, ElsewhereRig, assert_complete, changes

pytestmark = pytest.mark.soak


@pytest.fixture
def wire(s3_server: S3Server, proxy: MakeProxy) -> Proxy:
    return proxy(urlsplit(s3_server.url).port or 0)


@pytest.fixture
def far(wire: Proxy, s3_server: S3Server) -> dict[str, str]:
    """The bucket's options, through the proxy."""
    return {**s3_server.storage_options, "aws_endpoint_url": f"http://127.0.0.1:{wire.port}"}


@pytest.mark.spark
def test_sinks_go_on_when_the_bucket_is_back(
    run_program: RunProgram,
    settings_of: Callable[..., Settings],
    s3_server: S3Server,
    s3_url: str,
    redis_url: str,
    state_dir: Path,
    tmp_path: Path,
    wire: Proxy,
    far: dict[str, str],
) -> None:
    def log(options: dict[str, str]) -> dict[str, Any]:
        return {"kind": "segments", "uri": s3_url, "storage_options": options}

    config = tmp_path / "millrace.yaml"
    config.touch(mode=0o600)
    sinks = [{"kind": "redis", "url": redis_url}]
    facts = {"state": str(state_dir), "sinks": sinks, "log": log(far), "spark": {"memory": "600m"}}
    config.write_text(yaml.safe_dump(facts))
    settings = settings_of(log=log(s3_server.storage_options))
    with closing(cdc.log.open_writer(settings)) as writer:
        filled = FilledLog(settings, writer)
        filled.record(table())
        ends = [filled.append(labelled(1_000, 10, "first"))]
        program = run_program("-m", "cdc.service.apply.process", "--config", str(config))

        def reached() -> bool:
            assert program.running(), program.said()[-4000:]
            return [item.reached for item in filled.reader.consumers()] == ends[-1:]

        wait_until(reached, 120, "the first batch")
        wait_until(lambda: "is running" in program.said(), 120, "Spark's query")
        wire.cut()
        ends.append(filled.append(labelled(100, 20, "second")))
        wait_until(lambda: "does not answer" in program.said(), 120, "the sink says what is wrong")
        wire.pass_on()
        wait_until(reached, 120, "the second batch")


def test_capture_ends_with_a_transient_error_and_its_next_start_loses_and_doubles_nothing(
    s3_url: str, database: Database, state_dir: Path, run_program: RunProgram, wire: Proxy, far: dict[str, str]
) -> None:
    options = {name: Secret(value) for name, value in far.items()}
    rig = ElsewhereRig(database, state_dir, run_program, SegmentSettings(uri=s3_url, storage_options=options))
    rig.capture_tables(*SETUP, snapshot="initial")
    rig.begin()
    with rig.following() as following:
        changes(rig, 1000)
        following.reaches(rig.now())
        wire.cut()
        changes(rig, 2000)
        error = following.error(150)
    assert isinstance(error, LogLost) and "does not answer" in str(error)
    wire.pass_on()
    with rig.following() as following:
        following.reaches(rig.now())
    assert_complete(rig)
