"""What stands still, in a file that outlives every process."""

from collections.abc import Callable

import pytest

from cdc.config.settings import Settings
from cdc.errors import ConfigError, EnvironmentFault
from cdc.service.state import pauses
from cdc.service.state.pauses import Paused

Make = Callable[..., Settings]


@pytest.fixture
def settings(settings_of: Make) -> Settings:
    return settings_of(source={"tables": ["public.orders", 'odd."a.b"']}, sinks=[{"kind": "redis"}])


def test_nothing_is_paused_at_first(settings: Settings) -> None:
    assert pauses.read(settings.state) == Paused()


def test_sinks_and_tables_are_paused_and_resumed_one_by_one(settings: Settings) -> None:
    pauses.pause(settings, "redis")
    pauses.pause(settings, "public.orders")
    pauses.pause(settings, "public.orders")
    assert pauses.read(settings.state) == Paused(frozenset({"redis"}), frozenset({"public.orders"}))
    assert pauses.resume(settings, "redis") == Paused(tables=frozenset({"public.orders"}))
    assert pauses.resume(settings, "public.orders") == pauses.read(settings.state) == Paused()


def test_a_table_is_skipped_by_one_sink_and_resumed_there_or_everywhere(settings: Settings) -> None:
    pauses.skip(settings, "public.orders", "redis")
    assert pauses.read(settings.state) == Paused(skipped={"redis": frozenset({"public.orders"})})
    assert pauses.resume(settings, "public.orders", "redis") == Paused()
    pauses.pause(settings, "public.orders")
    pauses.skip(settings, "public.orders", "redis")
    assert pauses.resume(settings, "public.orders", "redis") == Paused(tables=frozenset({"public.orders"}))
    pauses.skip(settings, "public.orders", "redis")
    assert pauses.resume(settings, "public.orders") == Paused()


def test_every_request_to_resume_is_counted_so_that_what_waits_is_tried_again(settings: Settings) -> None:
    for count in (1, 2):
        pauses.resume(settings, "public.orders", "redis")
        assert pauses.read(settings.state).resumed == count
    assert pauses.pause(settings, "redis").resumed == 2


@pytest.mark.parametrize(("table", "sink"), [("public.orders", "lake"), ("public.nobody", "redis"), ("redis", "redis")])
def test_what_a_sink_does_not_have_cannot_be_skipped(settings: Settings, table: str, sink: str) -> None:
    with pytest.raises(ConfigError):
        pauses.skip(settings, table, sink)
    assert pauses.read(settings.state) == Paused()


def test_a_table_that_a_sink_is_not_given_cannot_be_skipped_there(settings_of: Make) -> None:
    sinks = [{"kind": "redis", "tables": ["public.orders"]}]
    with pytest.raises(ConfigError, match="has no table"):
        pauses.skip(
            settings_of(source={"tables": ["public.orders", "public.users"]}, sinks=sinks), "public.users", "redis"
        )


def test_a_table_may_be_quoted_in_any_way(settings: Settings) -> None:
    assert pauses.pause(settings, '"odd"."a.b"').tables == {'odd."a.b"'}


def test_an_unknown_name_is_refused_with_the_known_ones(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="neither a sink nor a table") as refused:
        pauses.pause(settings, "rediss")
    assert "redis" in refused.value.remedy
    assert "public.orders" in refused.value.remedy


def test_what_left_the_pipeline_can_still_be_resumed(settings: Settings, settings_of: Make) -> None:
    pauses.pause(settings, "redis")
    assert pauses.resume(settings_of(), "redis") == Paused()


def test_the_file_is_private_and_a_broken_one_is_not_guessed_at(settings: Settings) -> None:
    pauses.pause(settings, "redis")
    file = settings.state / "paused.json"
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("{")
    with pytest.raises(EnvironmentFault, match="not readable"):
        pauses.read(settings.state)
