"""Which process is which server: one small file each, written aside and renamed."""

import dataclasses
import json
import signal
from pathlib import Path

from cdc.durable_files import replace_unsynced
from deploy.local.process import Identity, alive
from deploy.local.server import Running


class Records:
    """The records of one state folder. A record outlives its process: it remembers the ports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, running: Running, stop: signal.Signals) -> None:
        """Note a server right after it was forked, with the signal that ends it tidily."""
        fields = {**dataclasses.asdict(running), "log": str(running.log), "data": str(running.data), "stop": int(stop)}
        replace_unsynced(self._folder / f"{running.name}.json", json.dumps(fields).encode())

    def last(self, name: str) -> Running | None:
        """The server as it was last started, whether or not it still runs."""
        found = self._read(name)
        return found[0] if found else None

    def stop_signal(self, name: str) -> signal.Signals:
        """What to send for a tidy end."""
        found = self._read(name)
        return found[1] if found else signal.SIGTERM

    def names(self) -> list[str]:
        """Every server that was ever started here."""
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def ports(self) -> dict[str, tuple[int, ...]]:
        """The ports of all of them, as they were last started."""
        return {it.name: it.ports for it in map(self.last, self.names()) if it is not None}

    def running(self) -> dict[str, Running]:
        """Those whose very process is alive."""
        found = map(self.last, self.names())
        return {it.name: it for it in found if it is not None and alive(Identity(it.pid, it.started))}

    def _read(self, name: str) -> tuple[Running, signal.Signals] | None:
        path = self._folder / f"{name}.json"
        if not path.is_file():
            return None
        fields = json.loads(path.read_text())
        stop = signal.Signals(fields.pop("stop"))
        typed = {"log": Path(fields["log"]), "data": Path(fields["data"]), "ports": tuple(fields["ports"])}
        return Running(**{**fields, **typed}), stop
