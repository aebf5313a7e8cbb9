"""Taking JSON objects apart and putting them together without touching a byte of their values.

Parsing and printing again would damage what the log kept: numbers of 40 digits, `1.10`, exponents, duplicate keys
inside `json` columns. So values are found by their bounds and copied. Input is trusted to be valid JSON (the log wrote
it); on anything else ValueError is raised with the place, never the text.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ATOM = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null|NaN|-?Infinity")
_SCALAR_MEMBER = re.compile(
    rf'({_STRING.pattern})[ \t\r\n]*:[ \t\r\n]*({_STRING.pattern}|{_ATOM.pattern})([ \t\r\n]*,[ \t\r\n]*(?="))?',
    re.DOTALL,
)
"""A member whose value is neither an object nor an array, with the comma before the next one, in one match: most are
so, and it saves two thirds of the time."""
_NESTING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
"""Finds where a value ends. Made a number, an integer of more than 4300 digits would be refused by Python."""


def members(text: str) -> dict[str, str]:
    """The members of an object: name to raw value, in their order."""
    found: dict[str, str] = {}
    at = _open(text, "{")
    while text[at : at + 1] != "}":
        if scalar := _SCALAR_MEMBER.match(text, at):
            name, value, comma = scalar.groups()
            found[unquote(name)] = value
            if comma:
                at = scalar.end()
                continue
            end = scalar.end()
        else:
            _expect(text, at, '"')
            colon = _value_end(text, at)
            start = _skip(text, _expect(text, _skip(text, colon), ":"))
            end = _value_end(text, start)
            found[unquote(text[at:colon])] = text[start:end]
        at = _after_value(text, end, "}")
    return found


def elements(text: str) -> Iterator[str]:
    """The raw elements of an array."""
    at = _open(text, "[")
    while text[at : at + 1] != "]":
        end = _value_end(text, at)
        yield text[at:end]
        at = _after_value(text, end, "]")


def build(values: Mapping[str, str]) -> str:
    """The object with these raw values: the opposite of `members`."""
    return "{" + ",".join(f"{quote(name)}:{value}" for name, value in values.items()) + "}"


def quote(text: str) -> str:
    """A JSON string, escaped only where JSON demands it (as the log writes it)."""
    if _PLAIN.fullmatch(text):
        return f'"{text}"'
    return '"' + _ESCAPED.sub(_escape, text) + '"'


def unquote(raw: str) -> str:
    """The text of a raw value: a string without its quotes and escapes, anything else as it stands."""
    if not raw.startswith('"'):
        return raw
    return str(json.loads(raw)) if "\\" in raw else raw[1:-1]


def splice(newer: str, older: str, missing: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """Fill `newer`'s missing columns from `older`; also returns the names that `older` lacks too.

    The order is `older`'s, so that a full older image gives the table's own column order; columns that only `newer`
    has come last.
    """
    new, old = members(newer), members(older)
    merged: dict[str, str] = {}
    for name, value in old.items():
        if name in new:
            merged[name] = new.pop(name)
        elif name in missing:
            merged[name] = value
    merged.update(new)
    return build(merged), tuple(name for name in missing if name not in merged)


_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPED = re.compile(r'["\\\x00-\x1f]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def _escape(match: re.Match[str]) -> str:
    return _SHORT.get(match[0]) or f"\\u{ord(match[0]):04x}"


def _skip(text: str, at: int) -> int:
    if text[at : at + 1] > " ":  # no blank, as in nearly every message
        return at
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _expect(text: str, at: int, character: str) -> int:
    if text[at : at + 1] != character:
        raise ValueError(f"malformed JSON: expected {character!r} at character {at}")
    return at + 1


def _open(text: str, bracket: str) -> int:
    return _skip(text, _expect(text, _skip(text, 0), bracket))


def _after_value(text: str, end: int, closing: str) -> int:
    at = _skip(text, end)
    if text[at : at + 1] == closing:
        return at
    at = _skip(text, _expect(text, at, ","))
    if text[at : at + 1] == closing:
        raise ValueError(f"malformed JSON: nothing after the comma before character {at}")
    return at


def _value_end(text: str, start: int) -> int:
    first = text[start : start + 1]
    if first and first in "{[":
        return _nested_end(text, start)
    match = (_STRING if first == '"' else _ATOM).match(text, start)
    if match is None:
        raise ValueError(f"malformed JSON: no value at character {start}")
    return match.end()


def _nested_end(text: str, start: int) -> int:
    """By Python's own scanner, three times as fast as counting brackets; what it returns is not used."""
    try:
        return _DECODER.raw_decode(text, start)[1]
    except RecursionError:
        return _counted_end(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: the value at character {start} ends at {error.pos}") from None


def _counted_end(text: str, start: int) -> int:
    """By counting brackets, not by recursion: `jsonb` may nest deeper than Python's stack."""
    depth = 0
    for token in _NESTING.finditer(text, start):
        if token[0] in "{[":
            depth += 1
        elif token[0] in "}]":
            depth -= 1
            if depth == 0:
                return token.end()
    raise ValueError(f"malformed JSON: the value at character {start} does not end")
