"""Spark's class archive, made before the suite if there is none: `python -m tests.spark_classes`.

The suite starts some sixty drivers, and each starts in a third of the time with the archive. A session writes it when
it ends, so a few tests that load most of the classes run first, in a process of their own.
"""

import os
import subprocess
import sys
from contextlib import suppress

from cdc.artifacts.jars import spark_archive, spark_jars
from tests.fix_processes import wait_until

_LOADING = ("tests/integration/service/test_query.py", "tests/integration/delta/test_spark_merge.py")


def main() -> None:
    """Return at once where the archive is there. Without one all is only slower, so nothing here ends the suite."""
    if _made():
        return
    print("Spark's class archive is made once: about two minutes", flush=True)
    subprocess.run([sys.executable, "-m", "pytest", "-q", *_LOADING], check=False)  # the suite runs and judges them
    with suppress(AssertionError):
        wait_until(_made, 30, "the JVM has written its class archive")


def _made() -> bool:
    return bool(spark_archive(os.pathsep.join(map(str, spark_jars())), learn=False))


if __name__ == "__main__":
    main()
