"""The Kafka log on brokers that ask who we are: TLS, SASL, and an authorizer with the documented rights."""

import argparse
import json
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from confluent_kafka import Producer
from cryptography.hazmat.primitives import serialization
from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePattern,
    ResourceType,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from pydantic import ValidationError

from cdc.artifacts.folders import make
from cdc.config.secret import Secret
from cdc.errors import LogError
from cdc.log.kafka.client import check_brokers
from cdc.log.kafka.read.reader import KafkaReader
from cdc.log.kafka.settings import KafkaSettings
from cdc.model import Lsn
from deploy.local.kafka import Kafka
from deploy.local.server import HOST, Site
from tests.fix_servers import LocalServer, _own_servers
from tests.scenes.kafka_rows import batch, writer

pytestmark = pytest.mark.kafka

ADMIN, WRITER, READER, GUEST = "admin-7c1f9a", "writer-2b8e4d", "reader-9d3a6c", "guest-4e8b1d"
"""Users, and their passwords alike: markers to look for where none may be."""
_PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
_USERS = f'{_PLAIN} username="{ADMIN}" password="{ADMIN}" ' + " ".join(
    f'user_{name}="{name}"' for name in (ADMIN, WRITER, READER, GUEST)
)
SASL = {
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
    "sasl.mechanism.inter.broker.protocol": "PLAIN",
    "listener.name.plaintext.plain.sasl.jaas.config": _USERS + ";",
    "listener.name.plaintext.scram-sha-512.sasl.jaas.config": (
        "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    ),
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": f"User:{ADMIN};User:ANONYMOUS",
}


@dataclass(frozen=True, slots=True)
class TlsKafka(Kafka):
    """A broker whose one listener speaks TLS: it answers once a handshake succeeds."""

    ca: str = ""

    def ready(self, site: Site) -> bool:
        """Shake hands."""
        trusted = ssl.create_default_context(cafile=self.ca)
        try:
            with (
                socket.create_connection((HOST, site.port), 2) as plain,
                trusted.wrap_socket(plain, server_hostname=HOST),
            ):
                return True
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates, and starts brokers that have one. Files lie where brokers, as another user, can read them."""

    signs: trustme.CA
    folder: Path
    servers: ExitStack
    home: Path

    @property
    def file(self) -> Path:
        """What to trust."""
        return self.folder / "ca.pem"

    def broker(self, protocol: str = "SSL", **more: str) -> LocalServer:
        """A broker whose listener speaks a protocol with TLS; underscores in further settings are dots."""
        store = self.issue("broker")
        settings = {
            "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,PLAINTEXT:{protocol}",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(store),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.file),
            **{name.replace("_", "."): value for name, value in more.items()},
        }
        return LocalServer(_own_servers(self.servers, TlsKafka(settings, ca=str(self.file)), self.home), "kafka")

    def issue(self, name: str, password: str = "") -> Path:
        """A key and its certificate in one file."""
        issued, file = self.signs.issue_cert(HOST), self.folder / f"{name}.pem"
        key = _pkcs8(issued.private_key_pem.bytes(), password)
        file.write_bytes(key + b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        file.chmod(0o644)
        return file


@pytest.fixture
def authority(private_servers: ExitStack, session_home: Path) -> Authority:
    folder = session_home / "certificates"
    folder.mkdir(mode=0o755, exist_ok=True)
    made = Authority(trustme.CA(), folder, private_servers, session_home)
    made.signs.cert_pem.write_to_path(str(made.file))
    made.file.chmod(0o644)
    return made


def _pkcs8(pem: bytes, password: str) -> bytes:
    """The only form of a key that Java reads."""
    key = serialization.load_pem_private_key(pem, None)
    locked = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)


def test_brokers_that_ask_for_a_certificate_are_given_ours(
    authority: Authority, topic_prefix: str, tmp_path: Path
) -> None:
    server = authority.broker(ssl_client_auth="required")
    own = authority.issue("client", password="planted-key-83d1")
    stranger = KafkaSettings(bootstrap=server.url, prefix=topic_prefix, security="ssl", ca=str(authority.file))
    files = {"certificate": str(own), "key": str(own), "key_password": Secret("planted-key-83d1")}
    settings = stranger.model_copy(update=files)
    writer(settings, tmp_path).append(batch(10, 3))
    assert KafkaReader(settings).head()[1] == 10
    with pytest.raises(LogError) as caught:
        check_brokers(stranger, 5)
    assert "log.certificate" in str(caught.value)
    assert "83d1" not in str(caught.value)


def test_passwords_go_over_tls_and_a_wrong_one_is_refused(
    authority: Authority, topic_prefix: str, tmp_path: Path
) -> None:
    users = SASL["listener.name.plaintext.plain.sasl.jaas.config"]
    server = authority.broker(
        "SASL_SSL",
        sasl_enabled_mechanisms="PLAIN",
        sasl_mechanism_inter_broker_protocol="PLAIN",
        listener_name_plaintext_plain_sasl_jaas_config=users,
    )
    told = {"security": "sasl_ssl", "mechanism": "PLAIN", "user": WRITER, "ca": str(authority.file)}
    settings = KafkaSettings(bootstrap=server.url, prefix=topic_prefix, password=Secret(WRITER), **told)
    writer(settings, tmp_path).append(batch(10, 3))
    assert KafkaReader(settings).head()[1] == 10
    with pytest.raises(LogError) as caught:
        KafkaReader(settings.model_copy(update={"password": Secret("wrong")})).head()
    assert not caught.value.transient


def test_changes_go_over_tls_and_a_stranger_is_not_spoken_to(
    authority: Authority, topic_prefix: str, tmp_path: Path
) -> None:
    server = authority.broker()
    settings = KafkaSettings(bootstrap=server.url, prefix=topic_prefix, security="ssl", ca=str(authority.file))
    writer(settings, tmp_path).append(batch(10, 3))
    assert KafkaReader(settings).head()[1] == 10
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    with pytest.raises(LogError, match="certificate") as caught:
        KafkaReader(settings.model_copy(update={"ca": str(other)})).head()
    assert not caught.value.transient


@pytest.fixture(scope="module")
def guarded(session_home: Path) -> Iterator[LocalServer]:
    """A broker with passwords and an authorizer, where nobody but the administrator has any right yet."""
    make(session_home, 0o711)
    with ExitStack() as stack:
        yield LocalServer(_own_servers(stack, Kafka(SASL), session_home), "kafka")


def sasl(server: LocalServer, prefix: str, user: str, password: str | None = None) -> KafkaSettings:
    secret = Secret(user if password is None else password)
    return KafkaSettings(
        bootstrap=server.url, prefix=prefix, security="sasl_plaintext", mechanism="PLAIN", user=user, password=secret
    )


def commanded(prefix: str, tmp_path: Path) -> list[list[str]]:
    """The command lines that the script would run."""
    program, said = tmp_path / "kafka-acls.sh", tmp_path / "said"
    program.write_text(f'#!/bin/sh\npython3 -c "import json,sys; print(json.dumps(sys.argv[1:]))" "$@" >> {said}\n')
    program.chmod(0o755)
    script = Path(__file__).parents[3] / "deploy" / "kafka" / "acls.sh"
    own = {"BOOTSTRAP": "x", "PREFIX": prefix, "WRITER": WRITER, "READER": READER}
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", str(script)], env={**own, "PATH": path}, check=True, capture_output=True)
    return [json.loads(line) for line in said.read_text().splitlines()]


def granted(command: list[str]) -> list[ACL]:
    """The rights that one command line of kafka-acls gives."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    for name in ("--bootstrap-server", "--allow-principal", "--topic", "--transactional-id", "--group"):
        parser.add_argument(name)
    parser.add_argument("--resource-pattern-type", default="literal")
    parser.add_argument("--operation", action="append")
    for name in ("--add", "--force", "--cluster"):
        parser.add_argument(name, action="store_true")
    told = parser.parse_args(command)
    if told.cluster:
        kind, name = ResourceType.CLUSTER, "kafka-cluster"
    elif told.transactional_id:
        kind, name = ResourceType.TRANSACTIONAL_ID, told.transactional_id
    elif told.group:
        kind, name = ResourceType.GROUP, told.group
    else:
        kind, name = ResourceType.TOPIC, told.topic
    pattern = ResourcePattern(kind, name, ACLResourcePatternType[told.resource_pattern_type.upper()])
    return [
        ACL(told.allow_principal, "*", ACLOperation[operation.upper()], ACLPermissionType.ALLOW, pattern)
        for operation in told.operation
    ]


def administrator(server: LocalServer, prefix: str) -> KafkaAdminClient:
    return KafkaAdminClient(**sasl(server, prefix, ADMIN).python_options(30))


class LateClosed(Producer):
    """Closed only when every answer to what it asked for at its start has come."""

    def close(self) -> bool:
        time.sleep(0.2)
        return super().close()


def test_the_documented_rights_are_enough_and_needed(guarded: LocalServer, topic_prefix: str, tmp_path: Path) -> None:
    own, theirs = sasl(guarded, topic_prefix, WRITER), sasl(guarded, topic_prefix, READER)
    with pytest.raises(LogError, match="refused") as caught:
        writer(own, tmp_path)
    assert not caught.value.transient
    admin = administrator(guarded, topic_prefix)
    rights = [right for command in commanded(topic_prefix, tmp_path) for right in granted(command)]
    admin.create_acls(rights)
    log = writer(own.model_copy(update={"retention_hours": 0.001}), tmp_path)
    log.append(batch(10, 5))
    log.append(batch(20, 5))
    reader = KafkaReader(theirs)
    assert sum(part.rows.num_rows for part in reader.read(reader.start())) == 10
    reader.commit("lake", Lsn(20))
    log.maintain()
    assert sum(part.rows.num_rows for part in reader.read(reader.start())) == 0
    with pytest.raises(LogError, match="refused"):
        writer(theirs, tmp_path)
    admin.close()


def test_a_login_without_rights_is_a_login(
    guarded: LocalServer, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.log.kafka.client.Producer", LateClosed)
    check_brokers(sasl(guarded, topic_prefix, GUEST), 30)


def test_a_wrong_password_is_named_and_never_shown(guarded: LocalServer, topic_prefix: str) -> None:
    wrong = sasl(guarded, topic_prefix, WRITER, "not-the-password-5e1c")
    with pytest.raises(LogError) as caught:
        KafkaReader(wrong).head()
    assert not caught.value.transient
    assert "password" in str(caught.value)
    assert "5e1c" not in f"{caught.value} {caught.value!r} {wrong!r} {wrong.model_dump_json()}"


def test_scram_users_get_in(guarded: LocalServer, topic_prefix: str, tmp_path: Path) -> None:
    admin = administrator(guarded, topic_prefix)
    admin.alter_user_scram_credentials([UserScramCredentialUpsertion("sam", ScramMechanism.SCRAM_SHA_512, "pw-4f2a")])
    rights = [right for command in commanded(topic_prefix, tmp_path) for right in granted(command)]
    for right in rights:
        right.principal = "User:sam"
    admin.create_acls(rights)
    admin.close()
    settings = sasl(guarded, topic_prefix, "sam", "pw-4f2a").model_copy(update={"mechanism": "SCRAM-SHA-512"})
    writer(settings, tmp_path).append(batch(10, 3))
    assert KafkaReader(settings).head()[1] == 10


@pytest.mark.parametrize("host", ["kafka.example:9092", "127.0.0.1:9092,10.0.0.7:9092", "[2001:db8::1]:9092"])
@pytest.mark.parametrize("security", ["plaintext", "sasl_plaintext"])
def test_nothing_goes_out_in_the_clear_unless_it_was_asked_for(host: str, security: str) -> None:
    told = {"bootstrap": host, "security": security, "user": "u", "password": "p-3c9d"}
    with pytest.raises(ValidationError, match=r"unencrypted to .*insecure") as caught:
        KafkaSettings.model_validate(told)
    assert "p-3c9d" not in str(caught.value)
    KafkaSettings.model_validate({**told, "insecure": True})
    KafkaSettings.model_validate({**told, "security": security.replace("plaintext", "ssl")})
    KafkaSettings.model_validate({**told, "bootstrap": "localhost:9092,[::1]:9092"})


def test_half_of_what_a_login_needs_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"needs log\.user and log\.password"):
        KafkaSettings(security="sasl_ssl", user="u")
    with pytest.raises(ValidationError, match="needed together"):
        KafkaSettings(security="ssl", certificate="own.pem")
