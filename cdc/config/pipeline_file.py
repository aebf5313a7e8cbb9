"""Reads a pipeline file into settings, before anything connects.

`MILLRACE_…` variables override the file. `${VAR}` in a value is replaced from the environment. Unknown keys are errors,
so that a typo never disables a setting silently.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import ValidationError

from cdc.config.settings import LogSettings, Section, Settings, SinkSettings, ViewSettings
from cdc.errors import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_P = TypeVar("_P", bound=Section)

LogKinds = Mapping[str, type[LogSettings]]
SinkKinds = Mapping[str, type[SinkSettings]]
ViewKinds = Mapping[str, type[ViewSettings]]
_NO_VIEWS: ViewKinds = {}


def load(
    path: Path,
    logs: LogKinds,
    sinks: SinkKinds,
    environment: Mapping[str, str] | None = None,
    *,
    views: ViewKinds = _NO_VIEWS,
) -> Settings:
    """Read, expand, override and check a pipeline file. Raises ConfigError, which names the key and a similar one."""
    variables = os.environ if environment is None else environment
    data = _parsed(path, _text(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} has no settings.", "Write a commented file with: millrace init")
    expanded = {str(key): _expand(value, variables, f"{path}: {key}") for key, value in data.items()}
    return check(_override(expanded, variables), logs, sinks, str(path), views=views)


class _DuplicateKey(yaml.MarkedYAMLError):
    """A key that is set twice: YAML would silently use the last one."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise _DuplicateKey(problem=f"{key.value} is set twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text, at byte {error.start + 1}.", "Save it as UTF-8.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder.", f"Name the file in it: --config {path / 'millrace.yaml'}") from None
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.", f"Write one with: millrace init {path}") from None
    except OSError as error:
        remedy = "Let the user of this command read it."
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", remedy) from None


def _parsed(path: Path, text: str) -> object:
    try:
        return _Loader(text).get_single_data()
    except _DuplicateKey as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(f"{path}, line {line}: {error.problem}.", "Keep one of the two.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML{_location(error, text)}.", _likely_mistake(error)) from None


def _location(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f" at line {text.count(chr(10), 0, error.position) + 1}"
    mark = getattr(error, "problem_mark", None)
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _likely_mistake(error: yaml.YAMLError) -> str:
    """The likely mistake. Does not repeat YAML's message, which may contain an unquoted password."""
    if isinstance(error, yaml.reader.ReaderError):
        return "Remove the control character there."
    if r"'\t'" in str(getattr(error, "problem", "")):
        return "There is a tab: indent with spaces."
    return "Check the indentation and quotes there."


def check(
    data: Mapping[str, object], logs: LogKinds, sinks: SinkKinds, origin: str, *, views: ViewKinds = _NO_VIEWS
) -> Settings:
    """Convert plain data to settings. Errors name `origin`."""
    sections = dict(data)
    log = sections.pop("log", None)
    stores = _listed(sections, "sinks", sinks, origin)
    derived = _listed(sections, "views", views, origin)
    typed: dict[str, object] = {}
    if log is not None:
        typed["log"] = _of_kind(log, logs, "log", origin, default="segments")
    elif "segments" in logs:
        typed["log"] = logs["segments"]()
    return _validated(Settings, {**sections, **typed, "sinks": stores, "views": derived}, "", origin)


def _listed(sections: dict[str, object], key: str, kinds: Mapping[str, type[_P]], origin: str) -> tuple[_P, ...]:
    """Takes a list of sections, each with a kind, out of `sections`."""
    listed = sections.pop(key, None) or []
    if not isinstance(listed, (list, tuple)):
        raise ConfigError(f"{origin}: {key} must be a list.", f"Write each of the {key} as `- kind: …`.")
    return tuple(_of_kind(item, kinds, f"{key}[{index}]", origin) for index, item in enumerate(listed))


def _of_kind(data: object, kinds: Mapping[str, type[_P]], key: str, origin: str, default: str = "") -> _P:
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: {key} must be a mapping.", "See: millrace init")
    kind = str(data.get("kind", default))
    if not kind:
        raise ConfigError(f"{origin}: {key} has no kind.", f"Known kinds: {', '.join(sorted(kinds))}.")
    if kind not in kinds:
        raise ConfigError(
            f"{origin}: {key}.kind {kind!r} is not known{_nearest(str(kind), kinds)}",
            f"Known kinds: {', '.join(sorted(kinds))}.",
        )
    return _validated(kinds[kind], {**data, "kind": kind}, key, origin)


def _validated(model: type[_P], data: Mapping[str, object], key: str, origin: str) -> _P:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _config_error(error, model, key, origin) from None


def _config_error(error: ValidationError, model: type[Section], section: str, origin: str) -> ConfigError:
    first = error.errors(include_input=False, include_url=False)[0]
    parts = [str(part) for part in first["loc"]]
    key = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in [section, *parts] if part).lstrip(".")
    if first["type"] == "extra_forbidden":
        near = _nearest(parts[-1], _keys_at(model, parts[:-1]))
        return ConfigError(f"{origin}: {key} is not a known setting{near}", "Every setting: docs/configuration.md.")
    between = ": " if first["type"] == "value_error" else " "
    text = between.join(filter(None, [key, _wrong(first["type"], first["msg"])]))
    return ConfigError(f"{origin}: {text}.", "Every setting: docs/configuration.md.")


def _wrong(kind: str, message: str) -> str:
    """What is wrong with a value: the part of a sentence that follows its key."""
    plain = {
        "missing": "is missing",
        "tuple_type": "must be a list",
        "dict_type": "must be a section of settings",
        "model_type": "must be a section of settings",
        "string_type": "must be text",
    }
    if kind in plain:
        return plain[kind]
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return re.sub(r"^(Input|String|Value) should ", "must ", message.partition(", unable to")[0])


def _keys_at(model: type[Section], path: list[str]) -> list[str]:
    here: type[Section] | None = model
    parts = iter(path)
    for part in parts:
        if part.isdigit():
            continue
        field = here.model_fields.get(part) if here else None
        here = next(_models(field.annotation), None) if field else None
        if field and get_origin(field.annotation) is dict:
            next(parts, None)  # the key of the entry: a table
    return list(here.model_fields) if here else []


def _models(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models(argument)


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def _expand(value: object, variables: Mapping[str, str], key: str) -> object:
    if isinstance(value, dict):
        return {name: _expand(item, variables, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, variables, f"{key}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        found = variables.get(name, default)
        if found is None:
            raise ConfigError(f"{key} uses ${{{name}}}, which is not set.", f"Set it: export {name}=…")
        return found

    return _VARIABLE.sub(replace, value)


def _override(data: dict[str, object], variables: Mapping[str, str]) -> dict[str, object]:
    """`MILLRACE_SOURCE__HOST=db` overrides source.host: two underscores step into a section."""
    merged = dict(data)
    for name, value in variables.items():
        path = name.removeprefix("MILLRACE_").lower().split("__")
        if not name.startswith("MILLRACE_") or (path[0] not in Settings.model_fields) or path[0] in ("sinks", "views"):
            continue
        if len(path) == 1:
            merged[path[0]] = value
            continue
        section = merged.get(path[0])
        merged[path[0]] = {**(section if isinstance(section, dict) else {}), path[1]: value}
    return merged
