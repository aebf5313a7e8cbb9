"""A table that is far larger than the memory of the process that reads it. Too long for CI: `make soak-tests`."""

import os
import resource

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import cdc.log
from bench.cpu_meter import peak_rss_mb
from cdc.service.daemon.supervisor import CAPTURE_ENVIRONMENT
from tests.fix_capture import Rig
from tests.fix_processes import wait_until

ROWS = int(os.environ.get("ROWS", "20000000"))
LIMIT = 1 << 30


@pytest.mark.soak
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("mode", ["initial", "incremental"])
def test_twenty_million_rows_pass_under_a_hard_memory_limit(rig: Rig, mode: str) -> None:
    """The limit is the kernel's: beyond it the process would get no memory and end."""
    rig.capture_tables("create table items (id bigint primary key, label text, filler text)", snapshot=mode)
    rig.database.execute(
        "alter table items set (autovacuum_enabled = off)",
        f"insert into items select g, 'label ' || g, repeat(md5(g::text), 3) from generate_series(1, {ROWS}) g",
        "analyze items",
    )
    program = rig.start(env=CAPTURE_ENVIRONMENT)
    resource.prlimit(program.pid, resource.RLIMIT_DATA, (LIMIT, LIMIT))

    def done() -> bool:
        assert program.running(), program.said()[-3000:]
        facts = rig.status()
        streams = facts.get("pid") == program.pid and facts.get("state") == "streaming"
        return streams and all(job["state"] == "done" for job in facts.get("backfills", ()))

    wait_until(done, 5000, "the whole table")
    rig.database.execute("update items set label = 'after' where id = 1")
    rig.wait_caught_up(program)
    print(f"{ROWS} rows, {mode}: {peak_rss_mb(program.pid):.0f} MB at most", flush=True)
    assert program.terminate() == 0
    log = cdc.log.open_reader(rig.settings)
    count = total = 0
    for piece in log.read(log.start()):
        read = piece.rows.filter(pc.equal(piece.rows["op"], pa.scalar("r")))
        numbers = pc.cast(pc.replace_substring_regex(read["key"], r"[^0-9]", ""), pa.int64())
        count, total = count + read.num_rows, total + (pc.sum(numbers).as_py() or 0)
    assert (count, total) == (ROWS, ROWS * (ROWS + 1) // 2)
