"""Imported by Python at its start: plants the engine and the kind of view of this folder."""

from pathlib import Path

import cdc.service.views
import views.kinds

_HERE = Path(__file__).parent
cdc.service.views.__path__.insert(0, str(_HERE / "service"))
views.kinds.__path__.insert(0, str(_HERE / "kinds"))
