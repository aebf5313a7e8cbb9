"""Free ports on loopback."""

import random
import socket
from collections.abc import Collection

from cdc.errors import EnvironmentFault
from deploy.local.server import HOST

_RANGE = range(20000, 32000)
"""Below the kernel's ephemeral ports (32768 and up), which outgoing connections could take between two starts."""


def free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def pick(taken: Collection[int] = ()) -> int:
    """A free port. Another program may take it before the server starts: the caller must then try again."""
    for candidate in random.sample(_RANGE, 200):
        if candidate not in taken and free(candidate):
            return candidate
    raise EnvironmentFault(
        f"No free port found between {_RANGE.start} and {_RANGE.stop - 1}.",
        "Stop some of the programs that listen there.",
    )


def open_at(port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
