"""An S3 server: S3Proxy, whose buckets are folders. A conditional PUT (`If-None-Match: *`) has one winner.

Clients need path-style addresses and, since the endpoint has no TLS, an option that allows plain HTTP.
"""

import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from cdc.artifacts import downloads, java, maven
from cdc.artifacts.account import account, secret_in, set_owner, write_private_file
from cdc.artifacts.class_archive import class_archive
from cdc.artifacts.progress import Report, silent
from cdc.config.secret import Secret
from deploy.local.server import HOST, Launch, Site

SET = "s3proxy-4.1.0"
ARTIFACT = "org.gaul:s3proxy:4.1.0:jar:jar-with-dependencies"
ACCESS_KEY = "millrace"
REGION = "us-east-1"
BUCKET = "millrace"
_FLAGS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class S3:
    """The server, with one bucket, `millrace`; clients may create more."""

    name: str = "s3"
    after: tuple[str, ...] = ()
    port_count: int = 1
    patience: float = 120
    own_user: bool = False

    def install(self, report: Report) -> None:
        """The jar and a Java."""
        java.java17_or_newer(report)
        _jar(report)

    def prepare(self, site: Site) -> Launch:
        """Write the settings, and create the bucket."""
        buckets = site.data / "buckets"
        for folder in (buckets, buckets / BUCKET):
            if not folder.exists():
                folder.mkdir(mode=0o700)
                set_owner(folder, account())
        settings = {
            "s3proxy.endpoint": f"http://{HOST}:{site.port}",
            "s3proxy.authorization": "aws-v2-or-v4",
            "s3proxy.identity": ACCESS_KEY,
            "s3proxy.credential": secret_key(site.private).reveal(),
            "jclouds.provider": "filesystem",
            "jclouds.filesystem.basedir": str(buckets),
        }
        properties = site.data / "s3proxy.properties"
        lines = "".join(f"{name}={value}\n" for name, value in settings.items())
        write_private_file(properties, lines, account())
        runtime, jar = java.java17_or_newer(silent), str(_jar(silent))
        archive = class_archive(runtime, SET, jar, account())
        command = (str(runtime), *archive, *_FLAGS, "-cp", jar, "org.gaul.s3proxy.Main")
        return Launch((*command, "--properties", str(properties)))

    def ready(self, site: Site) -> bool:
        """Whether it refuses a request without a signature, as S3 does."""
        try:
            with _OPENER.open(f"http://{HOST}:{site.port}/{BUCKET}", timeout=5):
                return True
        except urllib.error.HTTPError as error:
            return error.code == 403
        except OSError:
            return False

    def address(self, site: Site) -> str:
        """The endpoint."""
        return f"http://{HOST}:{site.port}"


def storage_options(address: str, private: Path) -> dict[str, str]:
    """What `deltalake` needs to reach a running server."""
    return {
        "aws_endpoint_url": address,
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": secret_key(private).reveal(),
        "aws_region": REGION,
        "aws_virtual_hosted_style_request": "false",
        "aws_allow_http": "true",
    }


def secret_key_file(private: Path) -> Path:
    """The file with the secret access key, one line."""
    return private / "s3-secret-key"


def secret_key(private: Path) -> Secret:
    """The secret access key of `ACCESS_KEY`."""
    return secret_in(secret_key_file(private))


def _jar(report: Report) -> Path:
    folder = downloads.provide(SET, lambda folder: maven.copy(ARTIFACT, folder, report), None, report)
    return next(folder.glob("*.jar"))
