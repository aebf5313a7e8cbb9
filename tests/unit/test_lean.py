"""The capture process starts without what it has no use for."""

import subprocess
import sys

_PROGRAM = """
import sys
import cdc.service.capture
from cdc.service import lean
lean.do_without("pandas")
import pyarrow as pa
from cdc.model import LOG_SCHEMA
assert pa.array([1, 2]).to_pylist() == [1, 2] and LOG_SCHEMA.empty_table().num_rows == 0
print(sorted(name for name in ("pandas", "pyspark", "py4j") if name in sys.modules))
"""


def test_capture_loads_neither_pandas_nor_spark() -> None:
    said = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
