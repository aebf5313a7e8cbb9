"""The durable log between capture and the stores. `registry` finds the kinds; no other module names one."""

from cdc.log.registry import LogKind, knock, open_reader, open_writer, settings_kinds

__all__ = ["LogKind", "knock", "open_reader", "open_writer", "settings_kinds"]
