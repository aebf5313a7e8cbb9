"""The kinds of sink, each named as its module: `sinks/<kind>.py` defines

    SETTINGS: type[SinkSettings]                                  with `kind: Literal["<kind>"] = "<kind>"`
    def open_sink(settings: …, context: SinkContext) -> Sink      may raise Busy or Lost: it is called again

A kind that needs more modules is a folder: SETTINGS is in `sinks/<kind>/settings.py`, which must not import the store's
client, and `open_sink` in `sinks/<kind>/sink.py`. No kind is listed here: a new module is enough (docs/add-a-sink.md).
"""

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

import sinks
from cdc.config.settings import SinkSettings
from cdc.discovery import Kinds, modules_that_define
from cdc.errors import ConfigError
from cdc.ports import Sink
from sinks.context import SinkContext


class SinkModule(Protocol):
    """What a sink's module defines."""

    def open_sink(self, settings: SinkSettings, context: SinkContext) -> Sink:
        """Connect. Must not create anything in the store: `prepare` does that."""


def settings_kinds() -> Mapping[str, type[SinkSettings]]:
    """Every kind's settings, by the name used in the pipeline file."""
    return Kinds(_modules(), lambda module: cast("type[SinkSettings]", module.SETTINGS))


def open_sink(settings: SinkSettings, context: SinkContext) -> Sink:
    """Open the sink that these settings describe. Only one with a shape needs DuckDB and sqlglot."""
    modules = _modules()
    if settings.kind not in modules:
        raise ConfigError(
            f"sink {settings.name!r}: unknown kind {settings.kind!r}.", f"Known kinds: {', '.join(sorted(modules))}."
        )
    opened = cast("SinkModule", importlib.import_module(module_of(settings.kind))).open_sink(settings, context)
    if not settings.shape:
        return opened
    from sinks.shape.sink import ShapedSink

    return ShapedSink(opened, settings)


def module_of(kind: str) -> str:
    """The module that defines `open_sink` of a known kind."""
    name = _modules()[kind]
    return name.removesuffix(".settings") + ".sink" if name.endswith(".settings") else name


def _modules() -> Mapping[str, str]:
    """Searched at each call: a cached list could be stale."""
    return modules_that_define("SETTINGS", sinks, "settings")
