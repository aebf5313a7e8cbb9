"""What OpenSearch shows of the index behind an alias: whose it is, whether it is open, and how much was written to it.

The id in the mapping's `_meta` is ours; an index that takes the place of another in a rebuild names the id of that one.
A primary shard counts its operations (`max_seq_no`): an index restored from a snapshot has counted fewer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sinks.fingerprints import Difference, Mark
from sinks.opensearch.client import Client, path_of

_AT_ONCE = 20  # aliases in one path: a server takes 4 kB of it
_SETTINGS = ("uuid", "number_of_shards", "verified_before_close")
_SHOWN = ",".join(["*.aliases", "*.mappings._meta", *(f"*.settings.index.{name}" for name in _SETTINGS)])
_COUNTED = "indices.*.shards.*.routing.primary,indices.*.shards.*.seq_no.max_seq_no"


@dataclass(frozen=True, slots=True)
class IndexFingerprint:
    """One index. `written` is 0 while a primary shard of it is missing."""

    name: str
    uuid: str
    closed: bool
    id: str
    replaces: str
    written: int = 0

    def mark(self) -> Mark:
        """To be kept."""
        return {"id": self.id, "uuid": self.uuid, "written": self.written}

    def against(self, known: Mark) -> Mark | Difference:
        """The mark now, or in what it differs."""
        if self.closed:
            again = f"Open it: POST /{self.name}/_open"
            return Difference(f"its index {self.name} is closed", again, refill=False)
        ours = self.id == known["id"] and self.uuid == known["uuid"]
        if not ours and self.replaces != known["id"]:
            return Difference(f"its alias leads to {self.name}, which is not the index that was written", _BACK)
        if ours and self.written and self.written < int(known["written"]):
            return Difference(f"its index {self.name} is an older copy of what was written", _BACK)
        return self.mark() if self.written or not ours else known


_BACK = "If the index that was written still exists, lead the alias to it."
_GONE = Difference("its index was deleted, or its alias", _BACK)


def shown(client: Client, aliases: Sequence[str]) -> Mapping[str, Sequence[IndexFingerprint]]:
    """What stands behind each alias; nothing where there is no such alias."""
    found: dict[str, list[IndexFingerprint]] = {alias: [] for alias in aliases}
    for start in range(0, len(aliases), _AT_ONCE):
        options = {"ignore_unavailable": "true", "filter_path": _SHOWN}
        indexes = client.json("GET", path_of(",".join(aliases[start : start + _AT_ONCE])), **options)
        written = _written(client, {name: facts for name, facts in indexes.items() if not _closed(facts)})
        for name, facts in indexes.items():
            for alias in found.keys() & facts.get("aliases", {}).keys():
                found[alias].append(_of(name, facts, written.get(name, 0)))
    return found


def compared(found: Sequence[IndexFingerprint], known: Mark) -> Mark | Difference:
    """The mark that an alias shows now, or why it is not what was written."""
    if not found:
        return _GONE
    if len(found) > 1:
        several = ", ".join(sorted(one.name for one in found))
        return Difference(f"its alias leads to several indexes ({several})", _BACK, refill=False)
    return found[0].against(known)


def _of(name: str, facts: Mapping[str, Any], written: int) -> IndexFingerprint:
    meta = facts.get("mappings", {}).get("_meta", {})
    uuid = str(facts["settings"]["index"]["uuid"])
    return IndexFingerprint(name, uuid, _closed(facts), str(meta.get("id", "")), str(meta.get("replaces", "")), written)


def _closed(facts: Mapping[str, Any]) -> bool:
    return "verified_before_close" in facts.get("settings", {}).get("index", {})


def _written(client: Client, indexes: Mapping[str, Any]) -> Mapping[str, int]:
    """Operations that the primary shards of each index have counted; left out where one of them is not at work."""
    if not indexes:
        return {}
    options = {"level": "shards", "ignore_unavailable": "true", "filter_path": _COUNTED}
    stats = client.json("GET", path_of(",".join(indexes), "_stats", "docs"), **options)
    counts: dict[str, int] = {}
    for name, facts in stats.get("indices", {}).items():
        copies = [copy for shard in facts.get("shards", {}).values() for copy in shard]
        primaries = [copy for copy in copies if copy["routing"]["primary"] and "seq_no" in copy]
        if len(primaries) == int(indexes[name]["settings"]["index"]["number_of_shards"]):
            counts[name] = sum(copy["seq_no"]["max_seq_no"] + 1 for copy in primaries)
    return counts
