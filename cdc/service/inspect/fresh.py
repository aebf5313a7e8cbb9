"""A Delta table with the newer changes of the log: `fresh("millrace.yaml", "public.orders").arrow()`.

Can be called while the pipeline runs, from any process that can read its state folder and its tables.
"""

from contextlib import closing
from pathlib import Path

from cdc.config.settings import Settings
from cdc.errors import ConfigError
from cdc.service.daemon.process import settings_from
from cdc.service.inspect.verification import chosen_sinks, parsed_table
from cdc.service.observe.positions import open_log
from cdc.service.state.sink_positions import consumer_name
from sinks.context import SinkContext
from sinks.delta.fresh import Fresh, fresh_view
from sinks.delta.settings import DeltaSettings
from sinks.delta.sink import open_sink
from sinks.shape.sink import ShapedSink


def fresh(pipeline: Settings | Path | str, table: str, sink: str = "") -> Fresh:
    """The table as of the head of the log; `sink` names the Delta sink if the pipeline has several.

    The trap: the result does not change any more. Call again for newer rows.
    """
    settings = pipeline if isinstance(pipeline, Settings) else settings_from(Path(pipeline))
    chosen = _delta_sink(settings, sink)
    name = parsed_table(table)
    if chosen.tables and name not in chosen.tables:
        raise ConfigError(
            f"Table {name} is not in the sink {chosen.name}.", "Choose another sink, or add the table to its `tables`."
        )
    with closing(open_sink(chosen, SinkContext(settings.state))) as opened:
        shape = ShapedSink(opened, chosen) if chosen.shape else None
        return fresh_view(opened, open_log(settings), name, consumer_name(chosen.name, name), shape)


def _delta_sink(settings: Settings, name: str) -> DeltaSettings:
    found = [one for one in chosen_sinks(settings, [name] if name else []) if isinstance(one, DeltaSettings)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"{name or 'The pipeline'} is not a sink of kind delta.", "A fresh view is of a Delta table.")
    raise ConfigError("The pipeline has several Delta sinks.", f"Name one: {', '.join(one.name for one in found)}.")
