"""The kinds of sink. A kind is `sinks/<kind>.py`, or `sinks/<kind>/sink.py` where it needs more than one module.

The module defines

    SETTINGS: type[SinkSettings]                                  with `kind: Literal["…"] = "…"`
    def open_sink(settings: …, context: SinkContext) -> Sink      may raise Busy or Lost: it is called again

No kind is listed here: a new module is enough (docs/add-a-sink.md).
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
        """Connect. Must not create anything in the store: `prepare` does that."""


def settings_kinds() -> Mapping[str, type[SinkSettings]]:
    """Every kind's settings, by the name used in the pipeline file."""
    return {kind: module.SETTINGS for kind, module in _modules().items()}


def open_sink(settings: SinkSettings, context: SinkContext) -> Sink:
    """Open the sink that these settings describe."""
    module = _modules().get(settings.kind)
    if module is None:
        raise ConfigError(
            f"sink {settings.name!r}: unknown kind {settings.kind!r}.",
            f"Known kinds: {', '.join(sorted(_modules()))}.",
        )
    return module.open_sink(settings, context)


def _modules() -> Mapping[str, SinkModule]:
    """Searched at each call: a cached list could be stale, and importing a module again is a dictionary look-up."""
    found: dict[str, SinkModule] = {}
    for name in modules_that_define("SETTINGS", sinks, "sink"):
        module = cast("SinkModule", importlib.import_module(name))
        kind = str(module.SETTINGS.model_fields["kind"].default)
        if kind in found:
            raise ConfigError(f"Two modules in sinks/ define the kind {kind!r}; one is {name}.", "Rename one.")
        found[kind] = module
    return found
