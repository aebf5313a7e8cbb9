"""A Python program for Spark's workers that connects to the JVM and authenticates before it imports anything.

Spark allows a worker ten seconds to connect and ten more to send its secret, whatever is configured, but a worker first
imports half of PySpark: on a busy machine, say after a reboot, no query would ever start. PySpark is then kept from
sending the secret a second time, and reads the JVM's answer itself.

Spark also puts an archive of PySpark's sources before the installed package, and Python compiles an archive's modules
at every start: 1.1 of a worker's 1.5 seconds of CPU. So the archives leave the path where the package is installed.
"""

import shlex
import sys
from pathlib import Path

_EARLY = """\
import os, runpy, socket, sys
from importlib.machinery import PathFinder

if sys.argv[1] != "-m":  # Spark also asks for the version, with -c
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
module, port = sys.argv[2], os.environ.get("PYTHON_WORKER_FACTORY_PORT")
secret = os.environ.get("PYTHON_WORKER_FACTORY_SECRET", "").encode()
if port and module != "pyspark.daemon":
    early = socket.create_connection(("127.0.0.1", int(port)))
    if secret:
        early.sendall(len(secret).to_bytes(4, "big") + secret)
    plain = socket.socket.connect

    def sent_before(value, stream):
        pyspark.write_with_length = write
        if value != secret:
            write(value, stream)

    def connect(self, address):
        if address[:2] != ("127.0.0.1", int(port)):
            return plain(self, address)
        socket.socket.connect = plain
        early.settimeout(self.gettimeout())
        os.dup2(early.fileno(), self.fileno())
        early.close()
        if secret:
            global pyspark, write
            pyspark = sys.modules["pyspark.util"]
            write, pyspark.write_with_length = pyspark.write_with_length, sent_before

    socket.socket.connect = connect
sys.argv = sys.argv[2:]
sys.path[0] = os.getcwd()
installed = [path for path in sys.path if not os.path.basename(path).startswith(("pyspark.zip", "py4j-"))]
if all(PathFinder.find_spec(name, installed) for name in ("pyspark", "py4j")):
    sys.path[:] = installed
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except (BrokenPipeError, ConnectionResetError):  # the JVM has ended the query
    sys.exit(1)
"""


def worker_python(folder: Path) -> Path:
    """Write the program into a folder; returns the path that Spark must call instead of `python`."""
    early, program = folder / "worker.py", folder / "python"
    early.write_text(_EARLY, encoding="utf-8")
    program.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(early))} "$@"\n', encoding="utf-8"
    )
    program.chmod(0o700)
    return program
