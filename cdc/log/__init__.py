"""The durable log between capture and the sinks. `registry` finds the kinds of log by their modules."""

from cdc.log.registry import LogKind, check_server, open_reader, open_writer, settings_kinds

__all__ = ["LogKind", "check_server", "open_reader", "open_writer", "settings_kinds"]
