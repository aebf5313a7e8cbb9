"""The kinds of view, each named as its module: `views/kinds/<kind>.py` defines

    SETTINGS: type[ViewSettings]                     with `kind: Literal["<kind>"] = "<kind>"`
    def plan(settings: ..., schemas: ...) -> Plan    raises ConfigError, which names the view and the place

No kind is listed here: a new module is enough.
"""

from collections.abc import Mapping
from typing import cast

from cdc.config.settings import ViewSettings
from cdc.discovery import Kinds, modules_that_define
from views import kinds


def settings_kinds() -> Mapping[str, type[ViewSettings]]:
    """Every kind's settings, by the name used in the pipeline file."""
    return Kinds(
        modules_that_define("SETTINGS", kinds, "settings"), lambda module: cast("type[ViewSettings]", module.SETTINGS)
    )
