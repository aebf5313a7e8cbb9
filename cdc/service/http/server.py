"""The HTTP server, in a thread of its own, with limits on connections, header size, body size and time."""

import socket
import threading
import time
from collections.abc import Callable

import uvicorn

from cdc.config.settings import Settings
from cdc.errors import EnvironmentFault
from cdc.service.http.guard import LARGEST_HEAD, guard
from cdc.service.http.protocol import TimeLimitedProtocol
from cdc.service.http.routes import Endpoint

_CONNECTIONS = 512
_KEEP_ALIVE = 5


class Server:
    """Listens inside a `with` block."""

    def __init__(self, settings: Settings) -> None:
        guard(settings.http)
        self._settings = settings.http
        self._endpoint = Endpoint(settings)
        config = uvicorn.Config(
            self._endpoint.app(),
            http=TimeLimitedProtocol,  # based on h11, which limits the size of headers; httptools does not
            log_config=None,  # use this process's logging, which redacts secrets
            access_log=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE,
            h11_max_incomplete_event_size=LARGEST_HEAD,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._socket = socket.socket(socket.AF_INET6 if ":" in settings.http.host else socket.AF_INET)

    def follow(self, settings: Settings) -> None:
        """Use the tables and sinks of reloaded settings. Address and token stay the same."""
        self._endpoint.observer.follow(settings)

    def show_standby(self, active: Callable[[], str] | None) -> None:
        """Say that this daemon waits for another one; None: it does not."""
        self._endpoint.observer.active_elsewhere = active

    def _serve(self) -> None:
        self._server.run([self._socket])

    def __enter__(self) -> "Server":
        self._listen()
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def _listen(self) -> None:
        host, port = self._settings.host, self._settings.port
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(256)
        except OSError as error:
            self._socket.close()
            raise EnvironmentFault(
                f"The HTTP endpoint cannot listen on {host}:{port}: {error.strerror}.",
                "Choose another with the setting http.port.",
            ) from None

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()
