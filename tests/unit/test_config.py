"""A wrong pipeline file is refused before anything connects, naming the key and the nearest one."""

from pathlib import Path
from typing import Literal

import pytest

from cdc.config.pipeline_file import load
from cdc.config.secret import Secret
from cdc.config.settings import LogSettings, Settings, SinkSettings
from cdc.errors import ConfigError
from cdc.model import TableId


class CardIndexSettings(SinkSettings):
    kind: Literal["cards"] = "cards"
    drawer: str = "a"


def read(tmp_path: Path, text: str, **environment: str) -> Settings:
    path = tmp_path / "millrace.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path, {"segments": LogSettings}, {"cards": CardIndexSettings}, environment)


def refused(tmp_path: Path, text: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, **environment)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_small_file_gets_defaults_for_the_rest(tmp_path: Path) -> None:
    settings = read(tmp_path, "source: {tables: [public.orders]}\nsinks: [{kind: cards}]")
    assert settings.source.tables[0].name == TableId("public", "orders")
    assert settings.source.slot == "millrace"
    assert settings.sinks[0].name == "cards"


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ("sourse: {}", "sourse", "'source'"),
        ("source: {hots: x}", "source.hots", "'host'"),
        ("source: {tables: [{name: public.a, colums: [id]}]}", "source.tables[0].colums", "'columns'"),
        ("sinks: [{kind: cards, drawr: b}]", "sinks[0].drawr", "'drawer'"),
        ("sinks: [{kind: crads}]", "sinks[0].kind", "'cards'"),
        ("log: {kind: segment}", "log.kind", "'segments'"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(tmp_path: Path, text: str, key: str, near: str) -> None:
    message = refused(tmp_path, text)
    assert key in message
    assert near in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("source: {port: many}", "source.port must be a valid integer."),
        ("source: {port: 99999}", "source.port must be less than or equal to 65535."),
        ("source: {tables: public.a}", "source.tables must be a list."),
        ("source: []", "source must be a section of settings."),
        ("source:\n\thost: a", "There is a tab"),
        ("source: {host: a, host: b}", "line 1: host is set twice."),
        ("state: \x00", "line 1"),
        ("sinks: [{drawer: b}]", "sinks[0] has no kind."),
        ("source: {slot: 'Not Allowed'}", "source.slot"),
        ("source: {tables: [orders]}", "schema.name"),
        ("source: {tables: [public.a, public.a]}", "listed twice"),
        ("sinks: [{kind: cards}, {kind: cards}]", "two sinks are named 'cards'"),
        ("sinks: {kind: cards}", "must be a list"),
        ("a: [1", "line 1"),
        ("just words", "has no settings"),
        ("source: {password: '${NOT_SET}'}", "source.password uses ${NOT_SET}"),
        ("sinks: [{kind: cards, drawer: '${NOT_SET}'}]", "sinks[0].drawer uses"),
    ],
)
def test_a_wrong_value_is_explained(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(tmp_path, text)


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="millrace init"):
        load(tmp_path / "none.yaml", {}, {}, {})


def test_a_file_that_is_no_text_or_no_file_is_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"# caf\xe9")
    for path, words in ((latin, "not UTF-8 text, at byte 6"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=words):
            load(path, {}, {}, {})


def test_variables_are_expanded_with_their_defaults(tmp_path: Path) -> None:
    settings = read(tmp_path, "source: {host: '${DB_HOST}', user: '${DB_USER:-reader}'}", DB_HOST="db1")
    assert (settings.source.host, settings.source.user) == ("db1", "reader")


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    settings = read(tmp_path, "source: {host: file}", MILLRACE_SOURCE__HOST="environment", MILLRACE_HTTP__PORT="9")
    assert (settings.source.host, settings.http.port) == ("environment", 9)


def test_a_misspelt_override_is_an_error_too(tmp_path: Path) -> None:
    assert "source.hots" in refused(tmp_path, "source: {}", MILLRACE_SOURCE__HOTS="x")


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    settings = read(tmp_path, "source: {password: correct-horse}")
    shown = f"{settings} {settings!r} {settings.model_dump_json()} {settings.source.password}"
    assert "correct-horse" not in shown
    assert settings.source.password.reveal() == "correct-horse"


def test_a_wrong_value_of_a_secret_is_not_shown_in_the_error(tmp_path: Path) -> None:
    assert "correct-horse" not in refused(tmp_path, "source: {password: correct-horse, port: correct-horse}")


def test_settings_cannot_be_changed_by_accident(tmp_path: Path) -> None:
    settings = read(tmp_path, "source: {}")
    with pytest.raises(ValueError):
        settings.source.host = "other"  # type: ignore[misc]
    assert Secret("") == settings.source.password


def test_an_unknown_key_of_a_shape_is_named_with_a_similar_one(tmp_path: Path) -> None:
    said = refused(tmp_path, "sinks: [{kind: cards, shape: {public.orders: {wher: status}}}]")
    assert "sinks[0].shape.public.orders.wher is not a known setting; did you mean 'where'?" in said


def test_a_wrong_expression_of_a_shape_is_named_with_its_place(tmp_path: Path) -> None:
    said = refused(tmp_path, "sinks: [{kind: cards, shape: {public.orders: {compute: {at: now()}}}}]")
    assert "shape.public.orders: compute.at, line 1, column 1: now does not give the same value" in said
