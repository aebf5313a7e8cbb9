"""The kinds of sink. A kind is `sinks/<kind>.py`, or `sinks/<kind>/sink.py` where it needs more than one module.

The module defines

    SETTINGS: type[SinkSettings]                                  with `kind: Literal["…"] = "…"`
    def open_sink(settings: …, context: SinkContext) -> Sink      which may raise Busy or Lost, and is then tried again

Nothing here names a kind, and nothing else has to be touched to add one (docs/add-a-sink.md).
"""

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

import sinks
from cdc.config.settings import SinkSettings
from cdc.discovery import modules_that_define
from cdc.errors import ConfigError
from cdc.ports import Sink
from sinks.context import SinkContext


class SinkModule(Protocol):
    """What a sink's module defines."""

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
    for name in modules_that_define("SETTINGS", sinks, "sink"):
        module = cast("SinkModule", importlib.import_module(name))
        kind = str(module.SETTINGS.model_fields["kind"].default)
        if kind in found:
            raise ConfigError(f"two modules in sinks/ define the kind {kind!r}; one is {name}.", "Rename one.")
        found[kind] = module
    return found
