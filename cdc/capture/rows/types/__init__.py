"""Postgres text to JSON, one file per type family. See `rendering` for the interface, docs/types.md for the result."""

import importlib
import pkgutil

from cdc.capture.rows.types.oids import BUILT_IN
from cdc.capture.rows.types.rendering import Rendered, Renderer, renderer_of

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

SESSION = {
    "client_encoding": "UTF8",
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmloption": "content",
}
"""Settings that change the text of values: every session whose text is rendered, replication or COPY, must set them
(for instance by `options=-c TimeZone=UTC …`), or equal rows would give different images."""

__all__ = ["BUILT_IN", "SESSION", "Rendered", "Renderer", "renderer_of"]
