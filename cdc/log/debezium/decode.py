"""Converts the messages of a Debezium connector to rows of the log.

Row images keep their exact text: it is cut out of the message, never parsed and formatted again.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from cdc.json_text.members import build, members
from cdc.log.debezium.types import declared_types
from cdc.log.kafka.envelope.decode import Decoded, NotAnEnvelope
from cdc.log.kafka.envelope.encode import join_table
from cdc.model import LOG_SCHEMA, Op, PgType

_TEXTS = json.JSONDecoder(parse_int=str, parse_float=str)
"""Keeps numbers as text: Python refuses to parse an integer of more than 4300 digits."""
PLACEHOLDER = "__debezium_unavailable_value"

Record = tuple[int, bytes, bytes]


@dataclass(frozen=True, slots=True)
class DebeziumDecoder:
    """Decodes the records of one partition. `placeholder` is the connector's text for a value that it does not have.

    `declared` collects, by schema id, the column types of messages that came with their schema.
    """

    placeholder: str = PLACEHOLDER
    declared: dict[int, dict[str, PgType]] = field(default_factory=dict, compare=False)

    def __call__(self, records: Sequence[Record]) -> Decoded:
        """The rows of one partition. A row's number is its Kafka offset: the order within a partition is the log's."""
        rows = []
        offsets = []
        for number, (offset, key, value) in enumerate(records):
            try:
                found = list(self._rows(offset, key, value))
            except (ValueError, KeyError, TypeError, IndexError, RecursionError):
                raise NotAnEnvelope(number) from None
            rows += found
            offsets += [offset] * len(found)
        table = pa.Table.from_pylist(rows, schema=LOG_SCHEMA) if rows else LOG_SCHEMA.empty_table()
        where = np.array(offsets, np.int64)
        return Decoded(table, where, where)

    def _rows(self, offset: int, key: bytes, value: bytes) -> Iterator[dict[str, object]]:
        parts = members(value.decode())
        declared = parts.get("schema")
        if "payload" in parts:
            parts = members(parts["payload"])
        op = json.loads(parts["op"])
        if op == Op.MESSAGE.value:
            return
        facts = facts_of(json.loads(parts["source"]), offset, op)
        before, after = _image(parts, "before"), _image(parts, "after")
        named = _key(key)
        if named is None and op == Op.UPDATE.value and before != after:
            # Without a key the whole row is the key, so an update is a delete and an insert.
            yield {**facts, "op": Op.DELETE.value, "key": before, "before": before, "schema_id": schema_id_of(before)}
            op, before = Op.INSERT.value, None
        after, unchanged = self._without_placeholders(after)
        if named is None and op != Op.TRUNCATE.value:
            named = after or before
        deleted = op == Op.DELETE.value
        schema_id = schema_id_of(after or before, unchanged or ())
        if declared is not None and schema_id not in self.declared:
            self.declared[schema_id] = declared_types(json.loads(declared))
        yield {
            **facts,
            "op": op,
            "key": named,
            "after": after,
            # With the default replica identity the connector fills unknown columns with zeros: not data.
            "before": None if deleted and _key(key) is not None else before,
            "unchanged": unchanged,
            "schema_id": schema_id,
        }

    def _without_placeholders(self, image: str | None) -> tuple[str | None, list[str] | None]:
        if image is None or not any(form in image for form in self._forms()):
            return image, None
        kept, unchanged = {}, []
        for name, text in members(image).items():
            if self._is_placeholder(text):
                unchanged.append(name)
            else:
                kept[name] = text
        return build(kept), unchanged or None

    def _forms(self) -> tuple[str, ...]:
        """The placeholder as text, as base64 and as hex: the connector's binary handling modes produce each."""
        from base64 import b64encode

        raw = self.placeholder.encode()
        return self.placeholder, b64encode(raw).decode(), raw.hex()

    def _is_placeholder(self, text: str) -> bool:
        value = _TEXTS.decode(text)
        if isinstance(value, list):
            return len(value) == 1 and value[0] in self._forms()
        if isinstance(value, dict):
            return list(value) == [self.placeholder]
        return value in self._forms()


def facts_of(source: Mapping[str, object], offset: int, op: str) -> dict[str, object]:
    """The columns that give order and origin.

    A snapshot row gets version 0: the connector stamps it with the slot's consistent point, which is above changes that
    were written earlier and are streamed later. `commit_lsn` is the end of the last commit before this transaction: the
    connector does not report the transaction's own commit, and this is in commit order too. No change has a version
    below it (docs/adr/0013-versions.md).
    """
    lsn = _number(source["lsn"])
    before = json.loads(str(source.get("sequence") or "[null,null]"))[0]
    committed = lsn if before is None else int(before)
    return {
        "table": join_table(str(source["schema"]), str(source["table"])),
        "version": 0 if op == Op.READ.value else max(lsn, committed),
        "commit_lsn": committed,
        "ordinal": offset,
        "xid": _number(source.get("txId")),
        "commit_ts": _number(source.get("ts_us")) or _number(source["ts_ms"]) * 1000,
        "before": None,
        "after": None,
        "unchanged": None,
    }


def _number(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int):
        raise ValueError("a number was expected")
    return value


def _key(key: bytes) -> str | None:
    text = key.decode()
    if text == "null":
        return None
    parts = members(text)
    return parts["payload"] if "payload" in parts and "schema" in parts else text


def _image(parts: Mapping[str, str], name: str) -> str | None:
    text = parts.get(name, "null")
    return None if text == "null" else text


def schema_id_of(image: str | None, unchanged: Sequence[str] = ()) -> int:
    """A number for the set of columns of an image: equal in every process, another if a column is added or removed."""
    names = sorted([*members(image), *unchanged]) if image is not None else []
    return int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:4]) >> 1
