"""A table's index: create it, add fields, rebuild it when a field changes its type.

Readers use the alias `<prefix><schema>.<table>`, which filters tombstones out. The index behind it has a number, so
that another can replace it in one step. The mapping's `_meta` keeps the version of the newest truncate, the schema's
id, the routing column and an id of the index. An index template gives the same mapping to an index that another
program creates, for instance a restore.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from cdc.errors import SinkError
from cdc.model import TableId, TableSchema
from sinks.fingerprints import new_id
from sinks.opensearch.client import Client, RequestRefused, path_of
from sinks.opensearch.mapping import column_problem, index_name, mapping
from sinks.opensearch.settings import OpenSearchSettings

_POLL = 0.2
_FORGOTTEN = 1.0
"""Seconds after a delete until a refresh forgets its version: OpenSearch reads the time every 200 ms."""
_PRIORITY = 200  # above the templates of OpenSearch and its plugins


@dataclass(frozen=True, slots=True)
class Index:
    """The present index of a table."""

    alias: str
    name: str
    truncated: int = 0
    schema_id: int = 0
    routing: str = ""
    id: str = ""
    """Chosen by Millrace; empty in an index that an older version of Millrace created."""
    replaces: str = ""
    """The id of the index that this one replaced in a rebuild."""
    table: str = ""
    """The table, if the index has several: truncate and schema are those of the table."""


@dataclass(frozen=True, slots=True)
class Indexes:
    """Creates and changes indexes."""

    client: Client
    settings: OpenSearchSettings
    wait: Callable[[float], None]

    @property
    def _sink(self) -> str:
        return self.settings.name

    def open(self, schema: TableSchema) -> Index:
        """The table's index, created or updated to this schema. An index of a newer schema stays unchanged."""
        for column in schema.columns:
            if problem := column_problem(column, self.settings.metadata):
                raise SinkError(f"sink {self._sink!r}: column {column.name!r} of {schema.table} {problem}.")
        alias = self.alias(schema.table)
        routing = self.settings.routing.get(str(schema.table), "")
        name = self.index_of(alias)
        if name is None:
            self._put_template(schema, alias)
            new = Index(alias, f"{alias}-000001", 0, schema.id, routing, new_id(), table=self._shared(schema.table))
            return self._create(schema, new)
        found = self._read(alias, name, schema.table)
        self._refuse_other_routing(found, routing)
        if found.schema_id > schema.id:
            return found
        self._put_template(schema, alias, name)
        index = replace(found, schema_id=schema.id)
        self._update_settings(index)
        try:
            self.client.json("PUT", path_of(name, "_mapping"), self._mappings(schema, self._meta(index)))
        except RequestRefused as refused:
            if refused.status != 400:
                raise self._failed(alias, refused) from None
            if index.table:
                raise self._other_types(schema, index) from None
            return self._rebuild(schema, index)
        return index

    def alias(self, table: TableId) -> str:
        """The alias of a table's index; several tables may have the same."""
        target = self.settings.target(table)
        return f"{self.settings.prefix}{target}" if target else index_name(self.settings.prefix, table)

    def _shared(self, table: TableId) -> str:
        return str(table) if self.settings.sharing(table) else ""

    def _other_types(self, schema: TableSchema, index: Index) -> SinkError:
        """An index of several tables is not rebuilt: its other documents are another table's."""
        stored, wanted = self._properties(index.name), self._mappings(schema, {})["properties"]
        wrong = [name for name, field in wanted.items() if name in stored and stored[name] != field]
        types = ", ".join(f"{name} is {stored[name].get('type')}, not {wanted[name].get('type')}" for name in wrong)
        return SinkError(
            f"sink {self._sink!r}: {schema.table} does not fit the index {index.alias} that it shares with other tables"
            f" ({types or 'see the OpenSearch log'}).",
            "Cast or rename the column in `shape`, or give the table a target of its own.",
        )

    def _properties(self, name: str) -> dict[str, Any]:
        answer = self.client.json("GET", path_of(name, "_mapping"))
        return dict(answer[name]["mappings"].get("properties", {}))

    def _meta(self, index: Index) -> dict[str, Any]:
        """The mapping's `_meta`. Where tables share the index, the entries of the others are read and kept."""
        ids = {name: value for name, value in (("id", index.id), ("replaces", index.replaces)) if value}
        own = {"truncated": index.truncated, "schema_id": index.schema_id}
        if not index.table:
            return {**own, **({"routing": index.routing} if index.routing else {}), **ids}
        exists = self.index_of(index.alias) == index.name
        others = self._stored_meta(index.name).get("tables", {}) if exists else {}
        return {"tables": {**others, index.table: own}, **ids}

    def _stored_meta(self, name: str) -> dict[str, Any]:
        answer = self.client.json("GET", path_of(name, "_mapping"))
        return dict(answer[name]["mappings"].get("_meta", {}))

    def _update_settings(self, index: Index) -> None:
        """Set the dynamic settings of an existing index to the configured values."""
        try:
            self.client.json("PUT", path_of(index.name, "_settings"), {"index": self.settings.dynamic_settings()})
        except RequestRefused as refused:
            raise self._failed(index.name, refused) from None

    def _put_template(self, schema: TableSchema, alias: str, name: str = "") -> None:
        """Write the table's index template. The longer name has the higher priority: OpenSearch refuses overlapping
        patterns of equal priority."""
        if not self.settings.template:
            return
        mappings = self._mappings(schema, {})
        if name and self._shared(schema.table):
            mappings["properties"] = {**self._properties(name), **mappings["properties"]}
        content = {"settings": self.settings.index_settings(), "mappings": mappings}
        body = {"index_patterns": [f"{alias}-*"], "priority": _PRIORITY + len(alias), "template": content}
        try:
            self.client.json("PUT", path_of("_index_template", alias), body)
        except RequestRefused as refused:
            raise self._failed(f"the template {alias}", refused) from None

    def _refuse_other_routing(self, found: Index, routing: str) -> None:
        if found.routing != routing:
            raise SinkError(
                f"sink {self._sink!r}: {found.name} was filled with routing by {found.routing or 'id'!r}, not "
                f"by {routing or 'id'!r}; rows would exist twice.",
                f"Delete the index {found.name}, then read the table again: millrace backfill.",
            )

    def index_of(self, alias: str) -> str | None:
        """The index that an alias points to; None if there is none."""
        found = orjson.loads(self.client.text("GET", path_of("_cat", "aliases", alias), format="json", h="index"))
        return str(found[0]["index"]) if found else None

    def record_truncate(self, index: Index, version: int) -> Index:
        """Store the truncate's version: rows with a lower one must not be written again."""
        changed = replace(index, truncated=version)
        self.client.json("PUT", path_of(index.name, "_mapping"), {"_meta": self._meta(changed)})
        return changed

    def with_id(self, index: Index) -> Index:
        """Give the index an id if it has none: an older version of Millrace created it."""
        if index.id:
            return index
        changed = replace(index, id=new_id())
        self.client.json("PUT", path_of(index.name, "_mapping"), {"_meta": self._meta(changed)})
        return changed

    def recreate(self, schema: TableSchema) -> None:
        """Create an empty index and move the alias to it. Earlier indexes stay, without the alias. Of an index that
        tables share, only the documents of this table are deleted."""
        alias = self.alias(schema.table)
        if self._shared(schema.table):
            self._clear(schema, alias)
            return
        self._put_template(schema, alias)
        wanted = {"expand_wildcards": "all", "filter_path": "*.aliases"}
        before = self.client.json("GET", path_of(f"{alias}-*"), **wanted) | self._behind(alias)
        numbers = [int(name[-6:]) for name in before if re.fullmatch(re.escape(alias) + r"-\d{6}", name)]
        routing = self.settings.routing.get(str(schema.table), "")
        name = f"{alias}-{max(numbers, default=0) + 1:06d}"
        self._create(schema, Index(alias, name, 0, schema.id, routing, new_id()), aliased=False)
        holders = [index for index, facts in before.items() if alias in facts.get("aliases", {})]
        actions: list[dict[str, Any]] = [{"remove": {"index": index, "alias": alias}} for index in holders]
        actions.append({"add": {"index": name, "alias": alias, "filter": self.live_rows()}})
        self.client.json("POST", "/_aliases", {"actions": actions})

    def _behind(self, alias: str) -> dict[str, Any]:
        return self.client.json("GET", path_of(alias), ignore_unavailable="true", filter_path="*.aliases")

    def _clear(self, schema: TableSchema, alias: str) -> None:
        """Delete a table's documents with their tombstones, and what OpenSearch remembers of their versions: the rows
        that follow may have older ones."""
        name = self.index_of(alias)
        if name is None:
            self.open(schema)
            return
        forgetting: dict[str, Any] = {"index": {"gc_deletes": "0s"}}
        self.client.json("PUT", path_of(name, "_settings"), forgetting)
        self.client.text("POST", path_of(name, "_refresh"))
        query = {"query": self.of_table(schema.table)}
        self.client.json("POST", path_of(name, "_delete_by_query"), query, refresh="true", conflicts="proceed")
        self.wait(_FORGOTTEN)
        self.client.text("POST", path_of(name, "_refresh"))
        self.client.json("PUT", path_of(name, "_settings"), {"index": {"gc_deletes": self._configured("gc_deletes")}})
        found = self._read(alias, name, schema.table)
        self.record_truncate(replace(found, schema_id=0), 0)

    def _configured(self, name: str) -> object:
        """A setting of indexes, None for OpenSearch's default."""
        return self.settings.index.get(name, self.settings.index.get(f"index.{name}"))

    def of_table(self, table: TableId) -> dict[str, Any]:
        """The query that finds the documents of a table."""
        if not self._shared(table):
            return {"match_all": {}}
        return {"term": {f"{self.settings.metadata}.table": str(table)}}

    def tombstones(self) -> dict[str, Any]:
        """The query that finds tombstones."""
        return {"term": {f"{self.settings.metadata}.deleted": True}}

    def _create(self, schema: TableSchema, index: Index, aliased: bool = True) -> Index:
        aliases = {index.alias: {"filter": self.live_rows()}} if aliased else {}
        mappings = self._mappings(schema, self._meta(index))
        body = {"settings": self.settings.index_settings(), "mappings": mappings, "aliases": aliases}
        try:
            self.client.json("PUT", path_of(index.name), body)
        except RequestRefused as refused:
            if refused.kind == "resource_already_exists_exception":
                raise SinkError(
                    f"sink {self._sink!r}: the index {index.name} exists, but no alias {index.alias} points to it.",
                    "Delete that index or choose another `prefix`.",
                ) from None
            raise self._failed(index.name, refused) from None
        return index

    def live_rows(self, table: TableId | None = None) -> dict[str, Any]:
        """The query that leaves tombstones out; and other tables, if one is given and the index has several."""
        own = {"filter": [self.of_table(table)]} if table is not None and self._shared(table) else {}
        return {"bool": {**own, "must_not": [self.tombstones()]}}

    def _mappings(self, schema: TableSchema, meta: dict[str, Any]) -> dict[str, Any]:
        overrides = self.settings.fields.get(str(schema.table), {})
        properties = mapping(schema, overrides, self.settings.metadata, bool(self._shared(schema.table)))
        return {"dynamic": False, "_meta": meta, "properties": properties}

    def _read(self, alias: str, name: str, table: TableId) -> Index:
        meta, shared = self._stored_meta(name), self._shared(table)
        if bool(shared) != ("tables" in meta):
            was, would = ("one table", "share it") if shared else ("several tables", "have it alone")
            raise SinkError(
                f"sink {self._sink!r}: the index {name} was filled by {was}, and {table} would {would}:"
                " rows would exist twice.",
                "Choose another target, or delete the index, then read its tables again: millrace refill.",
            )
        own = meta["tables"].get(shared, {}) if shared else meta
        truncated, schema_id = int(own.get("truncated", 0)), int(own.get("schema_id", 0))
        index_id, replaces = str(meta.get("id", "")), str(meta.get("replaces", ""))
        return Index(alias, name, truncated, schema_id, str(meta.get("routing", "")), index_id, replaces, shared)

    def _rebuild(self, schema: TableSchema, old: Index) -> Index:
        """Copy rows and versions into an index with the new fields, then move the alias in one step."""
        name = f"{old.alias}-{int(old.name.rpartition('-')[2]) + 1:06d}"
        new = replace(old, name=name, id=new_id(), replaces=old.id)
        self._drop_leftover(new.name)
        self._create(schema, new, aliased=False)
        self._copy(old.name, new.name)
        add = {"index": new.name, "alias": new.alias, "filter": self.live_rows()}
        self.client.json("POST", "/_aliases", {"actions": [{"add": add}, {"remove_index": {"index": old.name}}]})
        return new

    def _drop_leftover(self, name: str) -> None:
        """Delete the index that an interrupted rebuild left behind: no alias points to it."""
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

    def _failed(self, target: str, refused: RequestRefused) -> SinkError:
        return SinkError(
            f"sink {self._sink!r}: OpenSearch refuses {target} ({refused.status} {refused.kind}).",
            "See the OpenSearch log.",
        )
