"""All metrics of `/metrics`, in one list. docs/metrics.md is generated from it."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version

from cdc.service.observe.health import nested
from cdc.service.observe.metrics import Buckets, Family, Sample, numbers
from cdc.service.observe.observer import Observation
from cdc.service.state.status import Facts
from sinks.apply.timings import BOUNDS

Read = Callable[[Observation], Iterable[Sample | Buckets]]


def _one(value: float | None) -> Iterator[Sample]:
    if value is not None:
        yield (), value


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) else None


def _status(part: str, *path: str) -> Read:
    """One number of a part's status file; no sample if it is missing."""

    def read(seen: Observation) -> Iterator[Sample]:
        yield from _one(_number(nested(_facts(seen, part), *path[:-1]).get(path[-1])))

    return read


def _facts(seen: Observation, part: str) -> Facts:
    facts: Facts = getattr(seen, part)
    return facts


def _of_sinks(seen: Observation, name: str) -> Iterator[Sample]:
    for sink in sorted(nested(seen.apply, "sinks")):
        yield (sink,), _number(nested(seen.apply, "sinks", sink).get(name)) or 0


def _states(seen: Observation, state: str) -> Iterator[Sample]:
    for sink in sorted(nested(seen.apply, "sinks")):
        yield (sink,), float(nested(seen.apply, "sinks", sink).get("state") == state)


def _of_parts(seen: Observation, name: str) -> Iterator[Sample]:
    for part in sorted(nested(seen.daemon, "parts")):
        yield (part,), _number(nested(seen.daemon, "parts", part).get(name)) or 0


def _histograms(seen: Observation, name: str) -> Iterator[Buckets]:
    for sink in sorted(nested(seen.apply, "sinks")):
        facts = nested(seen.apply, "sinks", sink, name)
        counts = facts.get("counts")
        if isinstance(counts, list) and len(counts) == len(BOUNDS) + 1:
            yield Buckets((sink,), BOUNDS, tuple(map(int, counts)), _number(facts.get("total")) or 0.0)


def _applied(seen: Observation) -> Iterator[Sample]:
    for sink in sorted(nested(seen.apply, "sinks")):
        for table, count in numbers(nested(seen.apply, "sinks", sink, "changes")):
            yield (sink, table), count


def _captured(seen: Observation) -> Iterator[Sample]:
    for table in sorted(nested(seen.capture, "changes")):
        for op, count in numbers(nested(seen.capture, "changes", table)):
            yield (table, op), count


def _sink_lag(seen: Observation, unit: str) -> Iterator[Sample]:
    for sink, lag in sorted(seen.sink_lags.items()):
        yield (sink,), getattr(lag, unit)


def _table_lag(seen: Observation, unit: str) -> Iterator[Sample]:
    for labels, lag in sorted(seen.table_lags.items()):
        yield labels, getattr(lag, unit)


def _view_lag(seen: Observation, unit: str) -> Iterator[Sample]:
    for view, lag in sorted(seen.view_lags.items()):
        yield (view,), getattr(lag, unit)


def _of_views(seen: Observation, name: str) -> Iterator[Sample]:
    for view in sorted(nested(seen.views, "views")):
        yield (view,), _number(nested(seen.views, "views", view).get(name)) or 0


def _views_live(seen: Observation) -> Iterator[Sample]:
    for view in sorted(nested(seen.views, "views")):
        yield (view,), float(nested(seen.views, "views", view).get("state") == "live")


def _waiting(seen: Observation) -> Iterator[Sample]:
    for table in sorted(nested(seen.capture, "tables_waiting")):
        yield ("", table), 1.0
    for sink in sorted(nested(seen.apply, "sinks")):
        for table in sorted(nested(seen.apply, "sinks", sink, "tables_waiting")):
            yield (sink, table), 1.0


def _lost(seen: Observation) -> Iterator[Sample]:
    for sink in sorted(nested(seen.apply, "sinks")):
        for table in sorted(nested(seen.apply, "sinks", sink, "losses")):
            yield (sink, table), 1.0


def _skipped(seen: Observation) -> Iterator[Sample]:
    for sink in sorted(nested(seen.apply, "sinks")):
        tables = nested(seen.apply, "sinks", sink).get("tables_skipped")
        for table in tables if isinstance(tables, list) else ():
            yield (sink, str(table)), 1.0


def _standbys(seen: Observation) -> Iterator[Sample]:
    names = nested(seen.daemon, "lease").get("standbys")
    yield (), float(len(names)) if isinstance(names, list) else 0.0


def _ready(seen: Observation) -> Iterator[Sample]:
    yield (), float(seen.standby or not seen.reasons(tuple(seen.positions)))


FAMILIES = (
    Family("millrace_build_info", "gauge", ("version",), "Always 1.", lambda _: [((version("millrace"),), 1.0)]),
    Family("millrace_ready", "gauge", (), "1 when `/readyz` answers 200.", _ready),
    Family("millrace_observed_seconds", "gauge", (), "Unix time at which these figures were read.",
           lambda seen: _one(seen.at)),
    Family("millrace_standby", "gauge", (), "1 while this daemon waits; all other figures are those of the active one.",
           lambda seen: _one(float(seen.standby))),
    Family("millrace_standbys", "gauge", (), "Daemons that wait to take over, as the active one sees them.", _standbys),
    Family("millrace_takeovers_total", "counter", (), "Times that a standby took over this pipeline.",
           _status("daemon", "lease", "takeovers")),
    Family("millrace_part_restarts_total", "counter", ("part",), "Restarts of capture, views or apply.",
           partial(_of_parts, name="restarts")),
    Family("millrace_part_memory_bytes", "gauge", ("part",), "Resident memory of capture, views or apply.",
           partial(_of_parts, name="rss_bytes")),
    Family("millrace_source_lsn", "gauge", (), "End of the source's WAL when capture last read it, as a number.",
           _status("capture", "source_lsn")),
    Family("millrace_log_head_lsn", "gauge", (), "LSN up to which the log is complete, as a number.",
           lambda seen: _one(seen.head)),
    Family("millrace_capture_lag_bytes", "gauge", (), "WAL of the source that capture has not read.",
           lambda seen: _one(seen.capture_lag.bytes)),
    Family("millrace_capture_lag_seconds", "gauge", (), "Seconds since capture was last known to be up to date.",
           lambda seen: _one(seen.capture_lag.seconds)),
    Family("millrace_capture_changes_total", "counter", ("table", "op"),
           "Changes appended to the log; op is c, u, d, r (snapshot), t or m.", _captured),
    Family("millrace_capture_bytes_total", "counter", (), "Bytes of changes appended to the log.",
           _status("capture", "bytes_total")),
    Family("millrace_capture_queued_bytes", "gauge", (), "Bytes read from the source and not yet durable in the log.",
           _status("capture", "queued_bytes")),
    Family("millrace_capture_reconnects_total", "counter", (), "Connections to the source that were lost.",
           _status("capture", "reconnects")),
    Family("millrace_snapshot_rows", "gauge", (), "Rows read so far of the table that the first snapshot is reading.",
           _status("capture", "snapshot", "rows")),
    Family("millrace_snapshot_tables_done", "gauge", (), "Tables that the first snapshot has finished.",
           _status("capture", "snapshot", "tables_done")),
    Family("millrace_slot_retained_bytes", "gauge", (), "WAL that the source keeps for the replication slot.",
           _status("capture", "slot_retained_bytes")),
    Family("millrace_slot_room_bytes", "gauge", (),
           "WAL that may still be written before the slot is lost (max_slot_wal_keep_size) or source.wal_room_gb is "
           "used up; absent where neither is set.", lambda seen: _one(seen.slot_room)),
    Family("millrace_slot_seconds_to_full", "gauge", (), "Seconds until that is used up at the present rate.",
           lambda seen: _one(seen.slot_seconds)),
    Family("millrace_disk_free_bytes", "gauge", (), "Free space on the disk of the state folder.",
           lambda seen: _one(seen.disk_free)),
    Family("millrace_disk_seconds_to_full", "gauge", (), "Seconds until that disk is full at the present rate.",
           lambda seen: _one(seen.disk_seconds)),
    Family("millrace_view_live", "gauge", ("view",), "1 while the view follows the log.", _views_live),
    Family("millrace_view_lag_bytes", "gauge", ("view",),
           "WAL from what the view's rows in the log reflect to the newest known change.",
           partial(_view_lag, unit="bytes")),
    Family("millrace_view_lag_seconds", "gauge", ("view",), "Age of the oldest change that they do not reflect.",
           partial(_view_lag, unit="seconds")),
    Family("millrace_view_rows", "gauge", ("view",), "Rows of the view.", partial(_of_views, name="rows")),
    Family("millrace_view_state_bytes", "gauge", ("view",), "Size of the view's state on disk.",
           partial(_of_views, name="state_bytes")),
    Family("millrace_view_restarts_total", "counter", ("view",), "Times that the view failed and was opened again.",
           partial(_of_views, name="restarts")),
    Family("millrace_sink_running", "gauge", ("sink",), "1 while the sink applies or waits for changes.",
           partial(_states, state="running")),
    Family("millrace_sink_paused", "gauge", ("sink",), "1 while the sink is paused.",
           partial(_states, state="paused")),
    Family("millrace_sink_lag_bytes", "gauge", ("sink",), "WAL from the sink's position to the newest known change.",
           partial(_sink_lag, unit="bytes")),
    Family("millrace_sink_lag_seconds", "gauge", ("sink",), "Age of the oldest change not applied; 0 when up to date.",
           partial(_sink_lag, unit="seconds")),
    Family("millrace_table_lag_bytes", "gauge", ("sink", "table"), "The same for one table.",
           partial(_table_lag, unit="bytes")),
    Family("millrace_table_lag_seconds", "gauge", ("sink", "table"), "The same for one table.",
           partial(_table_lag, unit="seconds")),
    Family("millrace_table_waiting", "gauge", ("sink", "table"),
           "1 while the table waits because the store cannot take it; with an empty sink: because capture cannot "
           "follow it.", _waiting),
    Family("millrace_table_lost", "gauge", ("sink", "table"),
           "1 while the store lacks rows of the table that it had before.", _lost),
    Family("millrace_table_skipped", "gauge", ("sink", "table"), "1 while the sink skips the table.",
           _skipped),
    Family("millrace_sink_changes_total", "counter", ("sink", "table"),
           "Changes applied; several changes of one key in a batch count once.", _applied),
    Family("millrace_sink_visible_seconds", "histogram", ("sink",),
           "Time from the commit in the source to the end of the store's write, for each applied change; for rows of a "
           "snapshot, from the time of the snapshot.", partial(_histograms, name="visible")),
    Family("millrace_sink_batch_seconds", "histogram", ("sink",), "Duration of a batch.",
           partial(_histograms, name="batch_times")),
    Family("millrace_sink_restarts_total", "counter", ("sink",), "Restarts of the sink's query.",
           partial(_of_sinks, name="restarts")),
    Family("millrace_dead_letters", "gauge", ("sink",), "Dead letters: changes that the store refused.",
           partial(_of_sinks, name="dead_letters")),
)  # fmt: skip
"""In the order in which they are shown."""
