"""What the HTTP endpoint uses of uvicorn's class for a connection, which is not public, is there."""

import asyncio
import inspect
from importlib.metadata import version

from uvicorn.protocols.http.h11_impl import H11Protocol


def test_the_class_for_a_connection_has_what_is_used_of_it() -> None:
    made = inspect.getsource(H11Protocol.__init__)
    assert issubclass(H11Protocol, asyncio.Protocol), version("uvicorn")
    assert {"connection_made", "data_received", "connection_lost"} <= vars(H11Protocol).keys(), version("uvicorn")
    assert all(f"self.{name}" in made for name in ("loop", "conn", "transport")), version("uvicorn")
