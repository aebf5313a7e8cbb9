"""The durable log between capture and the stores: kinds are found, never named.

A kind of log is one file in this package that defines `KIND: LogKind`.
"""

from cdc.log.registry import LogKind, knock, open_reader, open_writer, settings_kinds

__all__ = ["LogKind", "knock", "open_reader", "open_writer", "settings_kinds"]
