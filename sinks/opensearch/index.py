"""A table's index behind its alias: created, widened, rebuilt where a field must change its type.

Readers use the alias `<prefix><schema>.<table>`, which hides tombstones; the index behind it is numbered, so that it
can be replaced in one step. The mapping's `_meta` keeps the version of the newest truncate, the schema's id, the
column of the routing and an id of the index. A template beside it gives the same mapping to an index that somebody
else makes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from cdc.errors import SinkError
from cdc.model import TableSchema
from sinks.fingerprints import new_id
from sinks.opensearch.client import Client, RequestRefused, path_of
from sinks.opensearch.mapping import index_name, mapping, unfit
from sinks.opensearch.settings import OpenSearchSettings

_POLL = 0.2
_PRIORITY = 200  # above what OpenSearch and its plugins bring


@dataclass(frozen=True, slots=True)
class Index:
    """Where a table lives now."""

    alias: str
    name: str
    truncated: int = 0
    schema_id: int = 0
    routing: str = ""
    id: str = ""
    """Ours alone; empty in an index that an older version made."""
    replaces: str = ""
    """The id of the index that it took the place of in a rebuild."""


@dataclass(frozen=True, slots=True)
class Indexes:
    """Makes and changes indexes."""

    client: Client
    settings: OpenSearchSettings
    wait: Callable[[float], None]

    @property
    def _sink(self) -> str:
        return self.settings.name

    def open(self, schema: TableSchema) -> Index:
        """The table's index, created or brought up to this schema; one made for a newer schema stays as it is."""
        for column in schema.columns:
            if why := unfit(column, self.settings.metadata):
                raise SinkError(f"sink {self._sink!r}: column {column.name!r} of {schema.table} {why}.")
        alias = index_name(self.settings.prefix, schema.table)
        routing = self.settings.routing.get(str(schema.table), "")
        name = self.behind(alias)
        if name is None:
            self._describe(schema, alias)
            return self._create(schema, Index(alias, f"{alias}-000001", 0, schema.id, routing, new_id()))
        found = self._found(alias, name)
        self._refuse_other_routing(found, routing)
        if found.schema_id > schema.id:
            return found
        self._describe(schema, alias)
        index = replace(found, schema_id=schema.id)
        self._adjust(index)
        try:
            self.client.json("PUT", path_of(name, "_mapping"), self._mappings(schema, _meta(index)))
        except RequestRefused as refused:
            if refused.status != 400:
                raise self._failed(alias, refused) from None
            return self._rebuild(schema, index)
        return index

    def _adjust(self, index: Index) -> None:
        """Have an index that was made under other settings take over those that can change."""
        try:
            self.client.json("PUT", path_of(index.name, "_settings"), {"index": self.settings.follows()})
        except RequestRefused as refused:
            raise self._failed(index.name, refused) from None

    def _describe(self, schema: TableSchema, alias: str) -> None:
        """Keep the table's template. A longer name wins where patterns overlap: equal priorities are refused."""
        if not self.settings.template:
            return
        content = {"settings": self.settings.shape(), "mappings": self._mappings(schema, {})}
        body = {"index_patterns": [f"{alias}-*"], "priority": _PRIORITY + len(alias), "template": content}
        try:
            self.client.json("PUT", path_of("_index_template", alias), body)
        except RequestRefused as refused:
            raise self._failed(f"the template {alias}", refused) from None

    def _refuse_other_routing(self, found: Index, routing: str) -> None:
        if found.routing != routing:
            raise SinkError(
                f"sink {self._sink!r}: {found.name} was filled with routing by {found.routing or 'id'!r}, not "
                f"by {routing or 'id'!r}; rows would be there twice.",
                f"Delete the index {found.name}, then read the table again: millrace backfill.",
            )

    def behind(self, alias: str) -> str | None:
        """The index that an alias stands for, if there is one."""
        found = orjson.loads(self.client.text("GET", path_of("_cat", "aliases", alias), format="json", h="index"))
        return str(found[0]["index"]) if found else None

    def remember_truncate(self, index: Index, version: int) -> Index:
        """Note the version below which no row may come back."""
        noted = replace(index, truncated=version)
        self.client.json("PUT", path_of(index.name, "_mapping"), {"_meta": _meta(noted)})
        return noted

    def signed(self, index: Index) -> Index:
        """With an id, which an index that an older version made does not have."""
        if index.id:
            return index
        signed = replace(index, id=new_id())
        self.client.json("PUT", path_of(index.name, "_mapping"), {"_meta": _meta(signed)})
        return signed

    def renew(self, schema: TableSchema) -> None:
        """A new index, empty, takes the alias over; those that had it, or once had it, stay as they are."""
        alias = index_name(self.settings.prefix, schema.table)
        self._describe(schema, alias)
        wanted = {"expand_wildcards": "all", "filter_path": "*.aliases"}
        before = self.client.json("GET", path_of(f"{alias}-*"), **wanted) | self._of_alias(alias)
        numbers = [int(name[-6:]) for name in before if re.fullmatch(re.escape(alias) + r"-\d{6}", name)]
        routing = self.settings.routing.get(str(schema.table), "")
        name = f"{alias}-{max(numbers, default=0) + 1:06d}"
        self._create(schema, Index(alias, name, 0, schema.id, routing, new_id()), aliased=False)
        holders = [index for index, facts in before.items() if alias in facts.get("aliases", {})]
        actions: list[dict[str, Any]] = [{"remove": {"index": index, "alias": alias}} for index in holders]
        actions.append({"add": {"index": name, "alias": alias, "filter": self._shown()}})
        self.client.json("POST", "/_aliases", {"actions": actions})

    def _of_alias(self, alias: str) -> dict[str, Any]:
        return self.client.json("GET", path_of(alias), ignore_unavailable="true", filter_path="*.aliases")

    def hidden(self) -> dict[str, Any]:
        """The query for tombstones."""
        return {"term": {f"{self.settings.metadata}.deleted": True}}

    def _create(self, schema: TableSchema, index: Index, aliased: bool = True) -> Index:
        aliases = {index.alias: {"filter": self._shown()}} if aliased else {}
        mappings = self._mappings(schema, _meta(index))
        body = {"settings": self.settings.shape(), "mappings": mappings, "aliases": aliases}
        try:
            self.client.json("PUT", path_of(index.name), body)
        except RequestRefused as refused:
            if refused.kind == "resource_already_exists_exception":
                raise SinkError(
                    f"sink {self._sink!r}: the index {index.name} exists, but no alias {index.alias} leads to it.",
                    "Delete that index or choose another `prefix`.",
                ) from None
            raise self._failed(index.name, refused) from None
        return index

    def _shown(self) -> dict[str, Any]:
        return {"bool": {"must_not": [self.hidden()]}}

    def _mappings(self, schema: TableSchema, meta: dict[str, Any]) -> dict[str, Any]:
        overrides = self.settings.fields.get(str(schema.table), {})
        properties = mapping(schema, overrides, self.settings.metadata)
        return {"dynamic": False, "_meta": meta, "properties": properties}

    def _found(self, alias: str, name: str) -> Index:
        answer = self.client.json("GET", path_of(name, "_mapping"))
        meta = answer[name]["mappings"].get("_meta", {})
        truncated, schema_id = int(meta.get("truncated", 0)), int(meta.get("schema_id", 0))
        own, replaces = str(meta.get("id", "")), str(meta.get("replaces", ""))
        return Index(alias, name, truncated, schema_id, str(meta.get("routing", "")), own, replaces)

    def _rebuild(self, schema: TableSchema, old: Index) -> Index:
        """Copy into a new index with the new fields, versions kept, then turn the alias over in one step."""
        name = f"{old.alias}-{int(old.name.rpartition('-')[2]) + 1:06d}"
        new = replace(old, name=name, id=new_id(), replaces=old.id)
        self._drop_leftover(new.name)
        self._create(schema, new, aliased=False)
        self._copy(old.name, new.name)
        add = {"index": new.name, "alias": new.alias, "filter": self._shown()}
        self.client.json("POST", "/_aliases", {"actions": [{"add": add}, {"remove_index": {"index": old.name}}]})
        return new

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
                f"sink {self._sink!r}: {len(failures)} document(s) of {old} do not fit the table's new types.",
                f"Delete the index {old}, then read the table again: millrace backfill.",
            )

    def _failed(self, place: str, refused: RequestRefused) -> SinkError:
        return SinkError(
            f"sink {self._sink!r}: OpenSearch refuses {place} ({refused.status} {refused.kind}).",
            "See its log.",
        )


def _meta(index: Index) -> dict[str, Any]:
    routing = {"routing": index.routing} if index.routing else {}
    own = {name: value for name, value in (("id", index.id), ("replaces", index.replaces)) if value}
    return {"truncated": index.truncated, "schema_id": index.schema_id, **routing, **own}
