"""The capture process starts without what it has no use for."""

import subprocess
import sys

_PROGRAM = """
import sys
import cdc.service.capture
from cdc.service.daemon import footprint
footprint.block_import("pandas")
footprint.collect_rarely()
import pyarrow as pa
from cdc.model import LOG_SCHEMA
assert pa.array([1, 2]).to_pylist() == [1, 2] and LOG_SCHEMA.empty_table().num_rows == 0
print(sorted(name for name in ("pandas", "pyspark", "py4j") if name in sys.modules))
"""


def test_capture_loads_neither_pandas_nor_spark() -> None:
    said = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


_DRAIN = """
import gc
from cdc.service.daemon import footprint
footprint.collect_rarely()
before = gc.get_stats()
frames = [memoryview(b"frame") for _ in range(20_000)]
print(gc.get_stats() == before)
"""


def test_a_feed_of_frames_is_read_without_a_look_for_garbage() -> None:
    said = subprocess.run([sys.executable, "-c", _DRAIN], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "True"
