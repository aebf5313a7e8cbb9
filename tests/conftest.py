"""Fixtures come from the fix_*.py files beside this one."""

from pathlib import Path

import pytest

pytest_plugins = [f"tests.{path.stem}" for path in sorted(Path(__file__).parent.glob("fix_*.py"))]
# they import one another: marked first, none is imported without its assertions rewritten
pytest.register_assert_rewrite(*pytest_plugins)
