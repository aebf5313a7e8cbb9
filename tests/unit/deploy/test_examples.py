"""The files of the examples are valid, without a server."""

import pytest

import cdc.log
import views.registry
from cdc.config.pipeline_file import load
from cdc.errors import ConfigError
from deploy.examples import example
from deploy.examples.example import Example, examples, named
from sinks import registry

EXAMPLES = examples().values()


@pytest.mark.parametrize("one", EXAMPLES, ids=lambda one: one.name)
def test_the_pipeline_file_needs_a_password_and_has_defaults_for_the_rest(one: Example) -> None:
    kinds = cdc.log.settings_kinds(), registry.settings_kinds()
    settings = load(one.config, *kinds, {"POSTGRES_PASSWORD": "secret"}, views=views.registry.settings_kinds())
    assert (settings.source.database, settings.source.slot) == (one.name, one.name)
    assert [view.name for view in settings.views] == [one.name]


@pytest.mark.parametrize("one", EXAMPLES, ids=lambda one: one.name)
def test_every_example_has_steps_and_explains_itself(one: Example) -> None:
    assert one.title.endswith(".")
    assert len(one.steps) >= 5
    assert all(step.sentence.endswith(".") and step.sql.strip() for step in one.steps)
    assert f"millrace example {one.name}" in (one.folder / "README.md").read_text(encoding="utf-8")


def test_an_unknown_example_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no example `timeline`") as refused:
        named("timeline")
    assert "timelines" in refused.value.remedy


def test_a_package_without_the_examples_says_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "FOLDER", example.FOLDER / "nowhere")
    with pytest.raises(ConfigError, match="not installed"):
        examples()
