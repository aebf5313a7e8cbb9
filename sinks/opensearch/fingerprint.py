"""The fingerprint of the index behind an alias: its id, whether it is open, and how many operations it counted.

Millrace keeps the id in the mapping's `_meta`; an index that replaced another in a rebuild also names the id of that
one. A primary shard counts its operations (`max_seq_no`): an index restored from a snapshot has counted fewer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sinks.fingerprints import Difference, Mark
from sinks.opensearch.client import Client, path_of

_ALIASES_PER_REQUEST = 20  # OpenSearch accepts a path of 4 kB
_SETTINGS = ("uuid", "number_of_shards", "verified_before_close")
_INDEX_FIELDS = ",".join(["*.aliases", "*.mappings._meta", *(f"*.settings.index.{name}" for name in _SETTINGS)])
_STATS_FIELDS = "indices.*.shards.*.routing.primary,indices.*.shards.*.seq_no.max_seq_no"


@dataclass(frozen=True, slots=True)
class IndexFingerprint:
    """One index. `written` is 0 while one of its primary shards is missing."""

    name: str
    uuid: str
    closed: bool
    id: str
    replaces: str
    written: int = 0

    def mark(self) -> Mark:
        """What Millrace stores to compare with later."""
        return {"id": self.id, "uuid": self.uuid, "written": self.written}

    def compared_with(self, known: Mark) -> Mark | Difference:
        """The present mark, or how the index differs from the known one."""
        if self.closed:
            remedy = f"Open it: POST /{self.name}/_open"
            return Difference(f"its index {self.name} is closed", remedy, refill=False)
        ours = self.id == known["id"] and self.uuid == known["uuid"]
        if not ours and self.replaces != known["id"]:
            return Difference(f"its alias points to {self.name}, not to the index that Millrace wrote", _RESTORE_ALIAS)
        if ours and self.written and self.written < int(known["written"]):
            return Difference(
                f"its index {self.name} is an older copy of the index that Millrace wrote", _RESTORE_ALIAS
            )
        return self.mark() if self.written or not ours else known


_RESTORE_ALIAS = "If the index that Millrace wrote still exists, point the alias to it."
_MISSING = Difference("its index was deleted, or its alias", _RESTORE_ALIAS)


def fingerprints(client: Client, aliases: Sequence[str]) -> Mapping[str, Sequence[IndexFingerprint]]:
    """The indexes behind each alias; none if the alias does not exist."""
    found: dict[str, list[IndexFingerprint]] = {alias: [] for alias in aliases}
    for start in range(0, len(aliases), _ALIASES_PER_REQUEST):
        options = {"ignore_unavailable": "true", "filter_path": _INDEX_FIELDS}
        indexes = client.json("GET", path_of(",".join(aliases[start : start + _ALIASES_PER_REQUEST])), **options)
        written = _written(client, {name: facts for name, facts in indexes.items() if not _closed(facts)})
        for name, facts in indexes.items():
            for alias in found.keys() & facts.get("aliases", {}).keys():
                found[alias].append(_of(name, facts, written.get(name, 0)))
    return found


def compared(found: Sequence[IndexFingerprint], known: Mark) -> Mark | Difference:
    """The present mark of an alias, or how its index differs from the one that Millrace wrote."""
    if not found:
        return _MISSING
    if len(found) > 1:
        several = ", ".join(sorted(one.name for one in found))
        return Difference(f"its alias points to several indexes ({several})", _RESTORE_ALIAS, refill=False)
    return found[0].compared_with(known)


def _of(name: str, facts: Mapping[str, Any], written: int) -> IndexFingerprint:
    meta = facts.get("mappings", {}).get("_meta", {})
    uuid = str(facts["settings"]["index"]["uuid"])
    return IndexFingerprint(name, uuid, _closed(facts), str(meta.get("id", "")), str(meta.get("replaces", "")), written)


def _closed(facts: Mapping[str, Any]) -> bool:
    return "verified_before_close" in facts.get("settings", {}).get("index", {})


def _written(client: Client, indexes: Mapping[str, Any]) -> Mapping[str, int]:
    """Operations that the primary shards of each index counted; an index with an inactive primary is left out."""
    if not indexes:
        return {}
    options = {"level": "shards", "ignore_unavailable": "true", "filter_path": _STATS_FIELDS}
    stats = client.json("GET", path_of(",".join(indexes), "_stats", "docs"), **options)
    counts: dict[str, int] = {}
    for name, facts in stats.get("indices", {}).items():
        copies = [copy for shard in facts.get("shards", {}).values() for copy in shard]
        primaries = [copy for copy in copies if copy["routing"]["primary"] and "seq_no" in copy]
        if len(primaries) == int(indexes[name]["settings"]["index"]["number_of_shards"]):
            counts[name] = sum(copy["seq_no"]["max_seq_no"] + 1 for copy in primaries)
    return counts
