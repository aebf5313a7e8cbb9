"""A table's index behind its alias: created, widened, rebuilt where a field must change its type.

Readers use the alias `<prefix><schema>.<table>`, which hides tombstones; the index behind it is numbered, so that it
can be replaced in one step. The version of the newest truncate is kept in the mapping's `_meta`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cdc.errors import SinkError
from cdc.model import TableSchema
from sinks.opensearch_client import Client, RequestRefused, path_of
from sinks.opensearch_mapping import index_name, mapping, unfit

_POLL = 0.2


@dataclass(frozen=True, slots=True)
class Index:
    """Where a table lives now."""

    alias: str
    name: str
    truncated: int


@dataclass(frozen=True, slots=True)
class Indexes:
    """Makes and changes indexes. `fields` overrides the mapping by table and column."""

    client: Client
    sink: str
    prefix: str
    metadata: str
    settings: Mapping[str, object]
    fields: Mapping[str, Mapping[str, Mapping[str, Any]]]
    wait: Callable[[float], None]

    def open(self, schema: TableSchema) -> Index:
        """The table's index, created or brought up to this schema."""
        for column in schema.columns:
            if why := unfit(column, self.metadata):
                raise SinkError(f"sink {self.sink!r}: column {column.name!r} of {schema.table} {why}.")
        alias = index_name(self.prefix, schema.table)
        name = self.behind(alias)
        if name is None:
            return self._create(schema, alias, f"{alias}-000001")
        truncated = self._truncated(name)
        try:
            self.client.json("PUT", path_of(name, "_mapping"), self._mappings(schema, truncated))
        except RequestRefused as refused:
            if refused.status != 400:
                raise self._failed(alias, refused) from None
            return self._rebuild(schema, alias, name, truncated)
        return Index(alias, name, truncated)

    def behind(self, alias: str) -> str | None:
        """The index that an alias stands for, if there is one."""
        try:
            return next(iter(self.client.json("GET", path_of("_alias", alias))), None)
        except RequestRefused as refused:
            if refused.status == 404:
                return None
            raise self._failed(alias, refused) from None

    def remember_truncate(self, index: Index, version: int) -> Index:
        """Note the version below which no row may come back."""
        self.client.json("PUT", path_of(index.name, "_mapping"), {"_meta": {"truncated": version}})
        return Index(index.alias, index.name, version)

    def hidden(self) -> dict[str, Any]:
        """The query for tombstones."""
        return {"term": {f"{self.metadata}.deleted": True}}

    def _create(self, schema: TableSchema, alias: str, name: str, truncated: int = 0, aliased: bool = True) -> Index:
        aliases = {alias: {"filter": {"bool": {"must_not": [self.hidden()]}}}} if aliased else {}
        body = {"settings": self.settings, "mappings": self._mappings(schema, truncated), "aliases": aliases}
        try:
            self.client.json("PUT", path_of(name), body)
        except RequestRefused as refused:
            if refused.kind == "resource_already_exists_exception" and aliased:
                raise SinkError(
                    f"sink {self.sink!r}: the index {name} exists, but no alias {alias} leads to it.",
                    "Delete that index or choose another `prefix`.",
                ) from None
            raise self._failed(name, refused) from None
        return Index(alias, name, truncated)

    def _mappings(self, schema: TableSchema, truncated: int) -> dict[str, Any]:
        overrides = self.fields.get(str(schema.table), {})
        properties = mapping(schema, overrides, self.metadata)
        return {"dynamic": False, "_meta": {"truncated": truncated}, "properties": properties}

    def _truncated(self, name: str) -> int:
        answer = self.client.json("GET", path_of(name, "_mapping"))
        return int(answer[name]["mappings"].get("_meta", {}).get("truncated", 0))

    def _rebuild(self, schema: TableSchema, alias: str, old: str, truncated: int) -> Index:
        """Copy into a new index with the new fields, versions kept, then turn the alias over in one step."""
        new = f"{alias}-{int(old.rpartition('-')[2]) + 1:06d}"
        self._drop_leftover(new)
        made = self._create(schema, alias, new, truncated, aliased=False)
        self._copy(old, new)
        add = {"index": new, "alias": alias, "filter": {"bool": {"must_not": [self.hidden()]}}}
        self.client.json("POST", "/_aliases", {"actions": [{"add": add}, {"remove_index": {"index": old}}]})
        return made

    def _drop_leftover(self, name: str) -> None:
        """What a rebuild left that was cut short: no alias leads to it."""
        try:
            self.client.json("DELETE", path_of(name))
        except RequestRefused as refused:
            if refused.status != 404:
                raise self._failed(name, refused) from None

    def _copy(self, old: str, new: str) -> None:
        self.client.text("POST", path_of(old, "_refresh"))
        body = {"source": {"index": old}, "dest": {"index": new, "version_type": "external"}}
        task = self.client.json("POST", "/_reindex", body, wait_for_completion="false", refresh="true")["task"]
        answer: dict[str, Any] = {}
        while not answer.get("completed"):
            self.wait(_POLL)
            answer = self.client.json("GET", path_of("_tasks", str(task)))
        failures = answer.get("response", {}).get("failures") or ([answer["error"]] if "error" in answer else [])
        if failures:
            raise SinkError(
                f"sink {self.sink!r}: {len(failures)} document(s) of {old} do not fit the table's new types.",
                f"Delete the index {old}, then read the table again: millrace backfill.",
            )

    def _failed(self, place: str, refused: RequestRefused) -> SinkError:
        return SinkError(f"sink {self.sink!r}: OpenSearch refuses {place} ({refused}).", "Look at its log.")
