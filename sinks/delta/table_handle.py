"""A Delta table on this machine that remembers its application transactions.

`deltalake` reads all commits since the last checkpoint for every such question: on a table that is written each
second, hundreds of files twice a batch. Commits never change, so only the new ones need a look.
"""

from pathlib import Path

import orjson
from deltalake import DeltaTable


class TransactionAwareTable(DeltaTable):
    """As `DeltaTable`, for tables in a folder. Not for two threads at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._log = folder / "_delta_log"
        self._ids: dict[str, int | None] = {}
        self._seen = -1

    def transaction_version(self, app_id: str) -> int | None:
        """The number that the newest commit with this application id carries."""
        self._learn(self.version())
        if app_id not in self._ids:
            self._ids[app_id] = super().transaction_version(app_id)
        return self._ids[app_id]

    def _learn(self, version: int) -> None:
        """Take in the commits since; a commit that is gone already means asking `deltalake` again."""
        for number in range(self._seen + 1, version + 1) if self._ids else ():
            try:
                commit = (self._log / f"{number:020}.json").read_bytes()
            except FileNotFoundError:
                self._ids.clear()
                break
            for line in filter(_may_be_transaction, commit.split(b"\n")):
                if found := orjson.loads(line).get("txn"):
                    self._ids[found["appId"]] = found["version"]
        self._seen = version


def _may_be_transaction(line: bytes) -> bool:
    return b'"txn"' in line
