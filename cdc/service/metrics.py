"""Prometheus text from what the parts said: pure."""

from collections.abc import Iterator, Mapping

from cdc.model import Lsn
from cdc.service.health import nested
from cdc.service.status import Facts


def exposition(capture: Facts, apply: Facts, reached: Mapping[str, Lsn], head: Lsn) -> str:
    """All metrics, in Prometheus's text format."""
    return "\n".join(_lines(capture, apply, reached, head)) + "\n"


def _lines(capture: Facts, apply: Facts, reached: Mapping[str, Lsn], head: Lsn) -> Iterator[str]:
    yield "# TYPE millrace_log_head_lsn gauge"
    yield f"millrace_log_head_lsn {head}"
    yield "# TYPE millrace_slot_retained_bytes gauge"
    yield f"millrace_slot_retained_bytes {_number(capture.get('slot_retained_bytes'))}"
    yield "# TYPE millrace_sink_lag_bytes gauge"
    for name, lsn in sorted(reached.items()):
        yield f'millrace_sink_lag_bytes{{sink="{name}"}} {max(0, head - lsn)}'
    yield "# TYPE millrace_sink_changes_total counter"
    for name in sorted(nested(apply, "sinks")):
        for table, count in sorted(nested(apply, "sinks", name, "changes").items()):
            yield f'millrace_sink_changes_total{{sink="{name}",table="{_label(table)}"}} {_number(count)}'
    yield "# TYPE millrace_dead_letters gauge"
    for name in sorted(nested(apply, "sinks")):
        yield f'millrace_dead_letters{{sink="{name}"}} {_number(nested(apply, "sinks", name).get("dead_letters"))}'


def _number(value: object) -> object:
    return value if isinstance(value, (int, float)) else 0


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
