"""What tables cost that do not change: start, memory and CPU of a pipeline with many of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from bench import cpu_meter
from bench.sinks.pipeline import Pipeline, Positions, Process, SinkEnvironment, sink_environment

_FEW = 10
_IDLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Figures:
    seconds_to_start: float
    capture_mb: float
    apply_mb: float
    cores: float


def idle_tables(tables: int) -> dict[str, Any]:
    """A pipeline with few tables, and one with so many, each with one row; nothing changes after the first snapshot."""
    with sink_environment(kafka=False) as environment:
        few, many = (_measured(environment, count) for count in (_FEW, tables))
    more = tables - _FEW
    return {
        "tables": tables,
        "seconds_to_start": {str(_FEW): few.seconds_to_start, str(tables): many.seconds_to_start},
        "capture_mb": {str(_FEW): few.capture_mb, str(tables): many.capture_mb},
        "apply_mb": {str(_FEW): few.apply_mb, str(tables): many.apply_mb},
        "cores_when_idle": {str(_FEW): few.cores, str(tables): many.cores},
        "per_idle_table": {
            "start_ms": round((many.seconds_to_start - few.seconds_to_start) / more * 1000, 2),
            "memory_kb": round((many.capture_mb + many.apply_mb - few.capture_mb - few.apply_mb) / more * 1024, 1),
            "cpu_us_per_s": round((many.cores - few.cores) / more * 1e6, 1),
        },
    }


def _measured(environment: SinkEnvironment, tables: int) -> _Figures:
    names = _create(environment.database.dsn, tables)
    sink = environment.sink("redis", f"idle_{tables}")
    pipeline = Pipeline(environment, "segments", environment.home / f"idle-{tables}", [sink], tables=names)
    begun = time.monotonic()
    try:
        capture, apply = pipeline.start("capture"), pipeline.start("apply")
        target = pipeline.captured()
        with Positions(pipeline.log(), [sink["name"]]) as positions:
            cpu_meter.wait(lambda: apply.alive() and positions.reached() >= target, "the snapshot", 900)
        started = time.monotonic() - begun
        used, since = capture.cpu() + apply.cpu(), time.monotonic()
        time.sleep(_IDLE_SECONDS)
        assert capture.alive() and apply.alive()
        cores = (capture.cpu() + apply.cpu() - used) / (time.monotonic() - since)
        return _Figures(round(started, 1), _tree_mb(capture), _tree_mb(apply), round(cores, 3))
    finally:
        pipeline.end()
        environment.database.drop_stream("bench_segments")


def _tree_mb(process: Process) -> float:
    assert process.process is not None
    return round(sum(cpu_meter.rss_mb(one) for one in cpu_meter.tree(process.process.pid)), 1)


def _create(dsn: str, tables: int) -> Sequence[str]:
    names = [f"idle_{tables}_{number}" for number in range(tables)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name in names:
            connection.execute(f"create table {name} (id bigint primary key, label text)".encode())
            connection.execute(f"insert into {name} values (1, 'one')".encode())
    return [f"public.{name}" for name in names]
