"""The key by which Redis shows that it still holds what was written: an id of ours, and the sink's position.

`<prefix>~store:<sink>` holds `<id> <position>`. Redis replicates one stream of commands, so a replica or a saved copy
that has the key with a position has every row up to there. In a cluster the key lies in one slot, and speaks for the
server that has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import redis

from cdc.errors import Lost
from cdc.model import Lsn, TableId, format_lsn
from sinks.fingerprints import Difference, Mark, new_id
from sinks.redis.keys import RESERVED

_EXCHANGE = "if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end redis.call('set', KEYS[1], ARGV[2]) return 1"
_EMPTY = Difference("it holds nothing of what was written: it was flushed, or an empty server took its place")
_OTHER = Difference("it is not the Redis that was written to", "Point the url to that one.")


@dataclass(slots=True)
class StoreMark:
    """The key of one sink; where that `keeps_rows`, an empty Redis lacks something."""

    client: "redis.Redis"
    prefix: str
    sink: str
    keeps_rows: bool
    _held: bytes | None = field(default=None, init=False)
    """What the key holds, as far as we know; None where it is not ours to change."""

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.prefix}{RESERVED}store:{self.sink}"

    def sign(self) -> Mark:
        """The id that the store has, or gets now."""
        self.client.set(self.key, new_id(), nx=True)
        self._held = self._get()
        return {"id": (self._held or b"").split(b" ")[0].decode()}

    def look(self, known: Mapping[TableId, Mark], reached: Lsn) -> Mapping[TableId, Mark | Difference]:
        """Compare the id and the position. One key speaks for every table."""
        held = self._get()
        if held is None and not (self.keeps_rows and not self._evicted()):
            held = str(next(iter(known.values()))["id"]).encode()  # nothing that must be there is missing
            self.client.set(self.key, held)
        self._held = held
        return {table: self._compared(held, mark, reached) for table, mark in known.items()}

    def passed(self, reached: Lsn) -> None:
        """Note the position, unless the key is not what it was. Raises Lost then: a look will say why."""
        if self._held is None:
            return
        moved = b"%b %016x" % (self._held.split(b" ")[0], reached)
        if moved != self._held and not self.client.eval(_EXCHANGE, 1, self.key, self._held, moved):
            self._held = None
            raise Lost(f"sink {self.sink!r}: Redis does not hold what was noted last.", "It is looked at again.")
        self._held = moved

    def _compared(self, held: bytes | None, known: Mark, reached: Lsn) -> Mark | Difference:
        if held is None:
            return _EMPTY
        identity, _, position = held.decode().partition(" ")
        if identity != known["id"]:
            return _OTHER
        if position and int(position, 16) < reached:
            copied = Lsn(int(position, 16))
            said = f"it is an older copy, of {format_lsn(copied)}, without writes that it had acknowledged"
            return Difference(said, whole_up_to=copied)
        return known

    def _get(self) -> bytes | None:
        held = self.client.get(self.key)
        return held.encode() if isinstance(held, str) else held

    def _evicted(self) -> bool:
        """Whether the key may be gone because Redis, full, removes whatever it likes."""
        policy = str(self.client.info("memory").get("maxmemory_policy", ""))
        evicted = int(self.client.info("stats").get("evicted_keys", 0))
        return policy.startswith("allkeys") and evicted > 0 and bool(self.client.info("keyspace"))
