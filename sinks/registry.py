"""The kinds of sink, found by looking: a kind is one file in this package.

A file is a sink when it defines

    SETTINGS: type[SinkSettings]                                  with `kind: Literal["…"] = "…"`
    def open_sink(settings: …, context: SinkContext) -> Sink      which may raise Busy or Lost, and is then tried again

Nothing here names a kind, and nothing else has to be touched to add one (docs/add-a-sink.md).
"""

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib.abc import InspectLoader
from typing import Protocol, cast

import sinks
from cdc.config import SinkSettings
from cdc.errors import ConfigError
from cdc.ports import Sink
from sinks.context import SinkContext


class SinkModule(Protocol):
    """What a sink's file holds."""

    SETTINGS: type[SinkSettings]

    def open_sink(self, settings: SinkSettings, context: SinkContext) -> Sink:
        """Connect. Must not create anything in the store: `prepare` does."""


def settings_kinds() -> Mapping[str, type[SinkSettings]]:
    """Every kind's settings, by the name used in the pipeline file."""
    return {kind: module.SETTINGS for kind, module in _modules().items()}


def open_sink(settings: SinkSettings, context: SinkContext) -> Sink:
    """Open the sink that these settings describe."""
    module = _modules().get(settings.kind)
    if module is None:
        raise ConfigError(
            f"sink {settings.name!r}: kind {settings.kind!r} is not known.",
            f"Known kinds: {', '.join(sorted(_modules()))}.",
        )
    return module.open_sink(settings, context)


def _modules() -> Mapping[str, SinkModule]:
    """Looks again at each call: importing twice costs a dictionary look-up, a stale list costs a search."""
    found: dict[str, SinkModule] = {}
    for name in _sink_files():
        module = cast("SinkModule", importlib.import_module(name))
        kind = str(module.SETTINGS.model_fields["kind"].default)
        if kind in found:
            raise ConfigError(f"two files in sinks/ define the kind {kind!r}; one is {name}.", "Rename one.")
        found[kind] = module
    return found


def _sink_files() -> Iterator[str]:
    """By reading, not by importing: some files beside the sinks import Spark, which costs a second."""
    for info in pkgutil.iter_modules(sinks.__path__, "sinks."):
        spec = importlib.util.find_spec(info.name)
        loader = spec.loader if spec else None
        if isinstance(loader, InspectLoader) and _DEFINES_SINK.search(loader.get_source(info.name) or ""):
            yield info.name


_DEFINES_SINK = re.compile(r"^SETTINGS\b", re.MULTILINE)
