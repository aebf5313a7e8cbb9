"""Secrets and cells are planted everywhere, everything that can fail does, and nobody says any of them.

What is searched: all that the daemon and its parts print at DEBUG, every command's output, every answer of the
endpoint, the status files, and what the process list shows of every process that we started.
"""

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest
import redis
import yaml
from psycopg import sql

from cdc.service.state import status
from deploy.local import ports
from sinks.apply.dead_letters import DeadLetters
from tests.fix_pipeline import Pipeline
from tests.fix_processes import Program, RunProgram, wait_until
from tests.fix_servers import Database, LocalServer, MakeRedis

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

_COMMANDS = (
    ("validate",),
    ("config", "show"),
    ("config", "show", "--json"),
    ("doctor",),
    ("doctor", "--json"),
    ("status",),
    ("status", "--json"),
    ("tables", "--json"),
    ("lag", "--json"),
    ("log", "positions"),
    ("version",),
)
_SHOWING_KEYS = (("dlq", "list", "--json"), ("log", "tail"))
_NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
_PATHS = ("readyz", "metrics", "openapi.json", "v1/status", "v1/cut", "v1/flow", "v1/history", "v1/dead-letters", "")


def mark(name: str) -> str:
    return f"planted-{name}-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True)
class Planted:
    """What must not be seen. `secrets` nowhere; `value` in no output; `key` only where keys are asked for."""

    source: str = field(default_factory=lambda: mark("source"))
    wrong: str = field(default_factory=lambda: mark("wrong"))
    redis: str = field(default_factory=lambda: mark("redis"))
    search: str = field(default_factory=lambda: mark("search"))
    token: str = field(default_factory=lambda: mark("token"))
    mask: str = field(default_factory=lambda: mark("mask"))
    spark: str = field(default_factory=lambda: mark("spark"))
    key: str = field(default_factory=lambda: mark("key"))
    value: str = field(default_factory=lambda: mark("value"))

    def in_text(self, text: str, but: str = "") -> list[str]:
        found = [name for name, planted in vars(self).items() if planted in text]
        return [name for name in found if name != but]


@dataclass
class Heard:
    """Everything that was said, by who said it."""

    said: dict[str, str] = field(default_factory=dict)

    def assert_clean(self, planted: Planted) -> None:
        leaks = {who: planted.in_text(text) for who, text in self.said.items()}
        assert {who: names for who, names in leaks.items() if names} == {}


@pytest.fixture
def planted() -> Planted:
    return Planted()


@pytest.fixture
def redis_with_password(private_redis: MakeRedis, planted: Planted) -> LocalServer:
    server = private_redis()
    _let_in(server, planted)
    return server


def _let_in(server: LocalServer, planted: Planted) -> None:
    with redis.Redis.from_url(server.url) as admin:
        admin.acl_setuser("planted", enabled=True, passwords=[f"+{planted.redis}"], keys=["*"], categories=["+@all"])


@pytest.fixture
def scene(
    database: Database,
    redis_with_password: LocalServer,
    opensearch_server: LocalServer,
    index_prefix: str,
    state_dir: Path,
    tmp_path: Path,
    run_program: RunProgram,
    planted: Planted,
) -> Iterator[Pipeline]:
    """A pipeline with a secret wherever one can be, over a table with a telling key and a telling value."""
    role = f"planted_{uuid.uuid4().hex[:8]}"
    with database.connect() as owner:
        owner.execute("create table people (email text primary key, note text, extra jsonb)")
        _role(owner, role, planted.source)
    secret = {"password": planted.source, "mask_key": planted.mask}
    where = {"host": database.server.host, "port": database.server.port, "database": database.name}
    names = {"user": role, "slot": database.name, "publication": "planted", "tables": ["public.people"]}
    sinks = [
        {"kind": "delta", "path": str(tmp_path / "lake")},
        {"kind": "opensearch", "url": opensearch_server.url, "prefix": index_prefix, "replicas": 0}
        | {"username": "millrace", "password": planted.search, "fields": {"public.people": {"extra": _NUMBERS}}},
        {"kind": "redis", "url": redis_with_password.url, "username": "planted", "password": planted.redis},
    ]
    sections = {
        "state": str(state_dir),
        "source": {**where, **names, **secret},
        "sinks": sinks,
        "http": {"port": ports.pick(), "token": planted.token},
        "spark": {"secrets": {"spark.hadoop.fs.s3a.secret.key": planted.spark}},
    }
    config = tmp_path / "millrace.yaml"
    config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    yield Pipeline(config, database, run_program)
    with database.connect() as owner:
        owner.execute("drop publication planted")
        owner.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(role)))


def _role(owner: psycopg.Connection[tuple[object, ...]], role: str, password: str) -> None:
    name = sql.Identifier(role)
    owner.execute(sql.SQL("create role {} login replication password {}").format(name, sql.Literal(password)))
    owner.execute(sql.SQL("grant select on people to {}").format(name))
    owner.execute("create publication planted for table people with (publish_via_partition_root = true)")


def test_nothing_that_was_planted_is_ever_said(
    scene: Pipeline, planted: Planted, redis_with_password: LocalServer, run_program: RunProgram, tmp_path: Path
) -> None:
    heard = Heard()
    _wrong_password(scene, planted, run_program, tmp_path, heard)
    write(scene, planted, 0)
    options = ("--config", str(scene.config), "--log-level", "DEBUG", "--log-format", "json")
    fails = {"MILLRACE_FAIL": "sink.after_apply:raise@2"}
    daemon = run_program("-m", "cdc.cli.main", "run", *options, env=fails)
    scene.settle(500)
    _poison(scene, planted)
    letters = DeadLetters(scene.settings.state / "dead-letters" / "opensearch")
    wait_until(lambda: letters.count() > 0, 120, "a dead letter")
    heard.said |= _process_list(daemon)
    _store_down(scene, planted, redis_with_password)
    scene.kill("apply")
    scene.kill("capture")
    write(scene, planted, 2)
    scene.settle(500)
    heard.said |= _process_list(daemon) | _endpoint(scene, planted) | _status_files(scene)
    heard.said |= _commands(scene.config, run_program, _COMMANDS)
    why = ("why", "public.people", json.dumps({"email": f"{planted.key}-0-0"}), "--json")
    for who, text in _commands(scene.config, run_program, (*_SHOWING_KEYS, why)).items():
        assert planted.in_text(text, but="key") == [], who
    assert daemon.terminate(60) == 0
    heard.said["daemon"] = daemon.said()
    assert "Injected" in heard.said["daemon"]
    assert "refused 1 change" in heard.said["daemon"]
    heard.assert_clean(planted)


def write(scene: Pipeline, planted: Planted, turn: int) -> None:
    with scene.database.connect() as owner:
        for number in range(20):
            row = (f"{planted.key}-{turn}-{number}", planted.value * 3, json.dumps({"n": 5, "text": planted.value}))
            owner.execute("insert into people values (%s, %s, %s)", row)
        owner.execute("update people set note = note || note")


def _poison(scene: Pipeline, planted: Planted) -> None:
    """A number in the index's mapping, and then something else."""
    with scene.database.connect() as owner:
        row = (f"{planted.key}-poison", planted.value, json.dumps({"n": planted.value}))
        owner.execute("insert into people values (%s, %s, %s)", row)


def _store_down(scene: Pipeline, planted: Planted, server: LocalServer) -> None:
    server.kill()
    write(scene, planted, 1)
    state = scene.settings.state
    wait_until(lambda: '"waiting"' in json.dumps(status.read(state, "apply")), 60, "the sink waits")
    server.start()  # and has forgotten who we are
    wait_until(lambda: "WRONGPASS" in json.dumps(status.read(state, "apply")), 60, "the sink is refused")
    _let_in(server, planted)


def _wrong_password(scene: Pipeline, planted: Planted, run_program: RunProgram, tmp_path: Path, heard: Heard) -> None:
    """Of the source, in `doctor` and `run`; of the files, in `validate`."""
    sections = yaml.safe_load(scene.config.read_text(encoding="utf-8"))
    sections["source"]["password"] = planted.wrong
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({**sections, "state": str(tmp_path / "wrong")}), encoding="utf-8")
    for command in (("doctor",), ("run", "--log-level", "DEBUG")):
        program = run_program("-m", "cdc.cli.main", *command, "--config", str(path))
        if command[0] == "run":
            _refused(program)
        else:
            assert program.wait(60) != 0
        heard.said[" ".join(("wrong password:", *command))] = program.said()
    for section, value in (("source", {"nonsense": 1}), ("http", {"port": "many"}), ("spark", {"memory": []})):
        broken = {**sections, section: {**sections[section], **value}}
        path.write_text(yaml.safe_dump(broken), encoding="utf-8")
        program = run_program("-m", "cdc.cli.main", "validate", "--config", str(path))
        assert program.wait(60) == 2
        heard.said[f"broken file: {section}"] = program.said()


def _refused(program: Program) -> None:
    wait_until(lambda: "password" in program.said().lower(), 60, "the refusal")
    program.terminate(60)


def _process_list(daemon: Program) -> dict[str, str]:
    """Also of the JVM."""
    found = _arguments(daemon)
    assert any("java" in text for text in found.values())
    return found


def _arguments(daemon: Program) -> dict[str, str]:
    """Arguments and environment of the daemon and everything below it."""
    here = psutil.Process(daemon.pid)
    found: dict[str, str] = {}
    for process in (here, *here.children(recursive=True)):
        for name in ("cmdline", "environ"):
            try:
                text = Path(f"/proc/{process.pid}/{name}").read_bytes().decode(errors="replace")
            except OSError:
                continue
            found[f"{name} of {process.pid}"] = text
    return found


def _endpoint(scene: Pipeline, planted: Planted) -> dict[str, str]:
    base = f"http://127.0.0.1:{scene.settings.http.port}/"
    headers = {"authorization": f"Bearer {planted.token}"}
    with httpx.Client(base_url=base, headers=headers, trust_env=False, timeout=30) as client:
        said = {f"GET /{path}": client.get(f"/{path}") for path in _PATHS}
        said["GET /livez without token"] = client.get("/livez", headers={"authorization": "x"})
        said["GET /v1/status without token"] = client.get("/v1/status", headers={"authorization": "x"})
        said["POST nonsense"] = client.post("/v1/pause", json={"target": "nobody"})
    assert said["GET /v1/dead-letters"].json()["total"] >= 1
    return {who: f"{answer.headers}{answer.text}" for who, answer in said.items()}


def _status_files(scene: Pipeline) -> dict[str, str]:
    folder = scene.settings.state / "status"
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}


def _commands(config: Path, run_program: RunProgram, commands: tuple[tuple[str, ...], ...]) -> Mapping[str, str]:
    """Some at a time: most of what a command takes is Python's start."""
    said = {}
    for at in range(0, len(commands), 4):
        some = commands[at : at + 4]
        started = {command: run_program("-m", "cdc.cli.main", *command, *_config(config, command)) for command in some}
        for command, program in started.items():
            program.wait(120)
            said[f"millrace {' '.join(command)}"] = program.said()
            assert not re.search(r"no such (option|command)", program.said(), re.IGNORECASE), program.said()
    return said


def _config(config: Path, command: tuple[str, ...]) -> tuple[str, ...]:
    return () if command == ("version",) else ("--config", str(config))


def test_the_password_of_a_broker_that_does_not_answer_is_nowhere(
    planted: Planted, state_dir: Path, tmp_path: Path, run_program: RunProgram
) -> None:
    log = {"kind": "kafka", "bootstrap": f"127.0.0.1:{ports.pick()}", "security": "sasl_plaintext"}
    account = {"mechanism": "PLAIN", "user": "millrace", "password": planted.source}
    source = {"port": ports.pick(), "password": planted.wrong, "tables": ["public.people"]}
    sections = {"state": str(state_dir), "source": source, "log": log | account, "http": {"port": ports.pick()}}
    config = tmp_path / "millrace.yaml"
    config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    options = ("--config", str(config))
    daemon = run_program("-m", "cdc.cli.main", "run", *options, "--log-level", "DEBUG")
    heard = Heard()
    try:
        wait_until(lambda: "Kafka does not answer" in daemon.said(), 200, "the failure")
        heard.said |= _arguments(daemon)
    finally:
        daemon.terminate(60)
    heard.said["daemon"] = daemon.said()
    asked = (("validate",), ("config", "show"), ("log", "positions"), ("doctor",))
    heard.said |= _commands(config, run_program, asked)
    heard.assert_clean(planted)
