"""The durable log between capture and the stores: kinds are found, never named.

A kind of log is one file in this package that defines `KIND: LogKind`.
"""

from cdc.log.registry import LogKind, open_reader, open_writer, settings_kinds

__all__ = ["LogKind", "open_reader", "open_writer", "settings_kinds"]
