"""The kinds of view, each named as its module: `views/kinds/<kind>.py` defines

    SETTINGS: type[ViewSettings]                     with `kind: Literal["<kind>"] = "<kind>"`
    def plan(settings: ..., schemas: ...) -> ViewPlan    raises ConfigError, which names the view and the place

No kind is listed here: a new module is enough.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from cdc.config.settings import ViewSettings
from cdc.discovery import Kinds, modules_that_define
from cdc.errors import ConfigError
from views import kinds

if TYPE_CHECKING:  # the steps of views take as long to import as everything else of a command
    from views.catalog import Catalog
    from views.plan import ViewPlan


class ViewModule(Protocol):
    """What the module of a kind defines."""

    def plan(self, settings: ViewSettings, catalog: "Catalog") -> "ViewPlan":
        """The plan of a view. Raises ConfigError, which names the view and the place."""


def settings_kinds() -> Mapping[str, type[ViewSettings]]:
    """Every kind's settings, by the name used in the pipeline file."""
    return Kinds(_modules(), lambda module: cast("type[ViewSettings]", module.SETTINGS))


def plan_of(settings: ViewSettings, catalog: "Catalog") -> "ViewPlan":
    """The plan of a view of any kind, checked against the captured tables."""
    modules = _modules()
    if settings.kind not in modules:
        raise ConfigError(
            f"view {settings.name}: unknown kind {settings.kind!r}.", f"Known kinds: {', '.join(sorted(modules))}."
        )
    return cast("ViewModule", importlib.import_module(modules[settings.kind])).plan(settings, catalog)


def _modules() -> Mapping[str, str]:
    return modules_that_define("SETTINGS", kinds, "settings")
