"""Spark's workers connect back before they import anything, and the worker then uses that very connection."""

import importlib.util
import os
import socket
import subprocess
from pathlib import Path

from sinks.spark.worker_python import worker_python

_WORKER = """\
import os, socket, time
time.sleep(float(os.environ["SLOW"]))
with socket.create_connection(("127.0.0.1", int(os.environ["PYTHON_WORKER_FACTORY_PORT"]))) as other:
    other.sendall(b"hello")
    print(other.recv(5).decode())
"""


def test_the_connection_is_there_before_the_worker_has_imported_anything(tmp_path: Path) -> None:
    folder = tmp_path / "a folder's name"
    folder.mkdir()
    (folder / "slow_worker.py").write_text(_WORKER)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        environment = {**os.environ, "PYTHON_WORKER_FACTORY_PORT": str(server.getsockname()[1]), "SLOW": "1"}
        command = [str(worker_python(folder)), "-m", "slow_worker"]
        worker = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(0.2)
            try:
                early = connection.recv(5)
            except TimeoutError:
                early = b"nothing yet"
            connection.settimeout(20)
            assert early == b"nothing yet"
            assert connection.recv(5) == b"hello"
            connection.sendall(b"reply")
            assert worker.communicate(timeout=20)[0] == b"reply\n"
    assert worker.returncode == 0


_PYSPARK = """\
import os, time
from pyspark.util import local_connect_and_auth
time.sleep(1)
port = int(os.environ["PYTHON_WORKER_FACTORY_PORT"])
file, _ = local_connect_and_auth(port, os.environ["PYTHON_WORKER_FACTORY_SECRET"])
file.write(b"hello")
file.flush()
"""


def test_the_secret_is_sent_at_once_and_only_once(tmp_path: Path) -> None:
    (tmp_path / "slow_worker.py").write_text(_PYSPARK)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        own = {"PYTHON_WORKER_FACTORY_PORT": str(server.getsockname()[1]), "PYTHON_WORKER_FACTORY_SECRET": "s3cret"}
        command = [str(worker_python(tmp_path)), "-m", "slow_worker"]
        worker = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **own})
        connection, _ = server.accept()
        with connection, connection.makefile("rwb") as file:
            assert file.read(10) == b"\0\0\0\6s3cret"
            assert worker.poll() is None
            file.write(b"\0\0\0\2ok")
            file.flush()
            assert file.read(5) == b"hello"
            assert worker.wait(60) == 0


def test_without_a_port_it_is_an_ordinary_python(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_WORKER_FACTORY_PORT"}
    command = [str(worker_python(tmp_path)), "-m", "this"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert b"Zen of Python" in done.stdout


def test_code_given_on_the_command_line_is_run(tmp_path: Path) -> None:
    command = [str(worker_python(tmp_path)), "-c", "import sys; print('%d' % sys.version_info[0])"]
    assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout == b"3\n"


def test_pyspark_comes_from_the_installed_package_and_not_from_sparks_archive(tmp_path: Path) -> None:
    """The archive holds no compiled modules: each worker would compile them again."""
    found = importlib.util.find_spec("pyspark")
    assert found and found.origin
    archives = sorted((Path(found.origin).parent / "python" / "lib").glob("*.zip"))
    assert len(archives) == 2
    (tmp_path / "shows.py").write_text("import pyspark, py4j\nprint(pyspark.__file__, py4j.__file__)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, archives))}
    command = [str(worker_python(tmp_path)), "-m", "shows"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True, timeout=60)
    assert b".zip" not in done.stdout
    assert done.stdout.count(b"__init__.py") == 2
