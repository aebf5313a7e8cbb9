"""Reading a pipeline file into settings, before anything connects.

`millrace.yaml`, overridden by `MILLRACE_…` variables. `${VAR}` in a value is replaced from the environment. Unknown
keys are errors, so that a typing mistake can never switch something off in silence.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError

from cdc.config import LogSettings, Part, Settings, SinkSettings
from cdc.errors import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_P = TypeVar("_P", bound=Part)

LogKinds = Mapping[str, type[LogSettings]]
SinkKinds = Mapping[str, type[SinkSettings]]


def load(path: Path, logs: LogKinds, sinks: SinkKinds, environment: Mapping[str, str] | None = None) -> Settings:
    """Read, expand, override and check a pipeline file. Raises ConfigError naming the key and the nearest known one."""
    variables = os.environ if environment is None else environment
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'cannot be read'}.", "Write one with: millrace init") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path} is not valid YAML{where}.", "Check the indentation and quotes there.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no settings.", "Write a commented file with: millrace init")
    expanded = {str(key): _expand(value, variables, f"{path}: {key}") for key, value in data.items()}
    return check(_override(expanded, variables), logs, sinks, str(path))


def check(data: Mapping[str, object], logs: LogKinds, sinks: SinkKinds, origin: str) -> Settings:
    """Turn plain data into settings; `origin` is named in errors."""
    sections = dict(data)
    log = sections.pop("log", None)
    listed = sections.pop("sinks", None) or []
    if not isinstance(listed, (list, tuple)):
        raise ConfigError(f"{origin}: sinks must be a list.", "Write each sink as `- kind: …`.")
    kinded: dict[str, object] = {}
    if log is not None:
        kinded["log"] = _of_kind(log, logs, "log", origin, default="segments")
    elif "segments" in logs:
        kinded["log"] = logs["segments"]()
    stores = tuple(_of_kind(sink, sinks, f"sinks[{index}]", origin) for index, sink in enumerate(listed))
    return _validated(Settings, {**sections, **kinded, "sinks": stores}, "", origin)


def _of_kind(data: object, kinds: Mapping[str, type[_P]], place: str, origin: str, default: str = "") -> _P:
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: {place} must be a mapping.", "See: millrace init")
    kind = str(data.get("kind", default))
    if kind not in kinds:
        raise ConfigError(
            f"{origin}: {place}.kind {kind!r} is not known{_nearest(str(kind), kinds)}.",
            f"Known kinds: {', '.join(sorted(kinds))}.",
        )
    return _validated(kinds[kind], {**data, "kind": kind}, place, origin)


def _validated(model: type[_P], data: Mapping[str, object], place: str, origin: str) -> _P:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _config_error(error, model, place, origin) from None


def _config_error(error: ValidationError, model: type[Part], place: str, origin: str) -> ConfigError:
    first = error.errors(include_input=False, include_url=False)[0]
    parts = [str(part) for part in first["loc"]]
    key = ".".join(filter(None, [place, *parts]))
    if first["type"] == "extra_forbidden":
        near = _nearest(parts[-1], _keys_at(model, parts[:-1]))
        return ConfigError(f"{origin}: {key} is not a known setting{near}.", "Every setting: docs/configuration.md.")
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{origin}: {key or 'the file'}: {message}.", "Every setting: docs/configuration.md.")


def _keys_at(model: type[Part], path: list[str]) -> list[str]:
    here: type[Part] | None = model
    for part in path:
        if part.isdigit():
            continue
        field = here.model_fields.get(part) if here else None
        here = next(_models(field.annotation), None) if field else None
    return list(here.model_fields) if here else []


def _models(annotation: object) -> Iterator[type[Part]]:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models(argument)


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _expand(value: object, variables: Mapping[str, str], place: str) -> object:
    if isinstance(value, dict):
        return {key: _expand(item, variables, f"{place}: {key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, variables, place) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        found = variables.get(name, default)
        if found is None:
            raise ConfigError(f"{place} asks for ${{{name}}}, which is not set.", f"Set it: export {name}=…")
        return found

    return _VARIABLE.sub(replace, value)


def _override(data: dict[str, object], variables: Mapping[str, str]) -> dict[str, object]:
    """`MILLRACE_SOURCE__HOST=db` overrides source.host: two underscores step into a section."""
    merged = dict(data)
    for name, value in variables.items():
        path = name.removeprefix("MILLRACE_").lower().split("__")
        if not name.startswith("MILLRACE_") or (path[0] not in Settings.model_fields) or path[0] == "sinks":
            continue
        if len(path) == 1:
            merged[path[0]] = value
            continue
        section = merged.get(path[0])
        merged[path[0]] = {**(section if isinstance(section, dict) else {}), path[1]: value}
    return merged
