"""The key that shows whether Redis still has what Millrace wrote: an id, and the sink's position.

`<prefix>~store:<sink>` contains `<id> <position>`. Redis replicates one stream of commands, so a replica or a saved
copy that has the key with a position has every row up to that position. In a cluster the key is in one slot, and only
covers the server of that slot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import redis

from cdc.errors import Lost
from cdc.model import Lsn, TableId, format_lsn
from sinks.fingerprints import Difference, Mark, new_id
from sinks.redis.keys import RESERVED

_SET_IF_EQUAL = (
    "if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end redis.call('set', KEYS[1], ARGV[2]) return 1"
)
_EMPTY = Difference("nothing that Millrace wrote is there: Redis was flushed, or replaced by an empty server")
_OTHER = Difference("it is not the Redis that Millrace wrote to", "Point the url to that one.")


@dataclass(slots=True)
class StoreMark:
    """The key of one sink. If the sink `keeps_rows`, an empty Redis has lost rows."""

    client: "redis.Redis"
    prefix: str
    sink: str
    keeps_rows: bool
    _value: bytes | None = field(default=None, init=False)
    """The last known value of the key; None if Millrace must not change it."""

    @property
    def key(self) -> str:
        """The name of the key."""
        return f"{self.prefix}{RESERVED}store:{self.sink}"

    def mark_table(self) -> Mark:
        """The id of the store; a store without one gets one."""
        self.client.set(self.key, new_id(), nx=True)
        self._value = self._get()
        return {"id": (self._value or b"").split(b" ")[0].decode()}

    def compare_marks(self, known: Mapping[TableId, Mark], reached: Lsn) -> Mapping[TableId, Mark | Difference]:
        """Compare the id and the position. One key covers every table."""
        value = self._get()
        if value is None and not (self.keeps_rows and not self._evicts()):
            value = str(next(iter(known.values()))["id"]).encode()  # no row that must be there is missing
            self.client.set(self.key, value)
        self._value = value
        return {table: self._compared(value, mark, reached) for table, mark in known.items()}

    def record_position(self, reached: Lsn) -> None:
        """Store the position. Raises Lost if the key has changed; `compare_marks` then finds the reason."""
        if self._value is None:
            return
        new = b"%b %016x" % (self._value.split(b" ")[0], reached)
        if new != self._value and not self.client.eval(_SET_IF_EQUAL, 1, self.key, self._value, new):
            self._value = None
            message = f"sink {self.sink!r}: Redis does not have the position that Millrace stored last."
            raise Lost(message, "Millrace reconnects and checks it.")
        self._value = new

    def _compared(self, value: bytes | None, known: Mark, reached: Lsn) -> Mark | Difference:
        if value is None:
            return _EMPTY
        identity, _, position = value.decode().partition(" ")
        if identity != known["id"]:
            return _OTHER
        if position and int(position, 16) < reached:
            copied = Lsn(int(position, 16))
            message = f"it is an older copy, of {format_lsn(copied)}, without writes that it had acknowledged"
            return Difference(message, whole_up_to=copied)
        return known

    def _get(self) -> bytes | None:
        value = self.client.get(self.key)
        return value.encode() if isinstance(value, str) else value

    def _evicts(self) -> bool:
        """Whether Redis may have evicted the key because its memory is full."""
        policy = str(self.client.info("memory").get("maxmemory_policy", ""))
        evicted = int(self.client.info("stats").get("evicted_keys", 0))
        return policy.startswith("allkeys") and evicted > 0 and bool(self.client.info("keyspace"))
