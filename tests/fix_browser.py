"""Real headless Chromium, driven through its debugging pipe: no driver, no socket, nothing but the browser."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cdc.artifacts import packages
from cdc.errors import EnvironmentFault
from tests.fix_processes import wait_until

_QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]


@pytest.fixture(scope="session")
def chromium() -> str:
    """Its path; installed where that is allowed."""
    if shutil.which("chromium") is None:
        try:
            packages.install(["chromium"], "Chromium", lambda line: None)
        except EnvironmentFault as fault:
            pytest.skip(str(fault))
    return shutil.which("chromium") or ""


class Page:
    """One tab. Commands are those of the DevTools protocol."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number = 0
        self._rest = b""
        self._session = ""
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; requests that the page makes meanwhile are noted in `asked`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("method") == "Network.requestWillBeSent":
                self.asked.append(found["params"]["request"]["url"])
            if found.get("id") == self._number:
                assert "error" not in found, found
                return dict(found["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._receive, 1 << 16)
            assert piece, "the browser ended"
            self._rest += piece
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))

    def open(self, address: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=address)
        wait_until(lambda: self.run("document.readyState") == "complete", 60, "the page")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self) -> str:
        """What a person reads."""
        return str(self.run("document.body.innerText"))

    def shows(self, text: str, deadline: float = 30) -> None:
        """Wait until the page says so."""
        wait_until(lambda: text in self.text(), deadline, f"the page says {text!r}: {self.text()[:2000]}")

    def press(self, key: str, text: str = "") -> None:
        """A key on the keyboard."""
        code = {"Tab": 9, "Enter": 13, " ": 32}.get(key, 0)
        known = {"key": key, "windowsVirtualKeyCode": code, "code": "Space" if key == " " else key}
        self.call("Input.dispatchKeyEvent", type="keyDown", **known, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    def dress(self, *, width: int = 1200, phone: bool = False, dark: bool = False) -> None:
        """Screen and colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """A screenshot of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browsing(chromium: str, profile: Path) -> Iterator[Page]:
    """A browser with one tab, gone at the end of the block."""
    to_read, to_send = os.pipe()
    from_read, from_send = os.pipe()

    def wire() -> None:  # the browser reads commands on 3 and answers on 4
        os.dup2(to_read, 30)
        os.dup2(from_send, 31)
        os.dup2(30, 3)
        os.dup2(31, 4)

    command = [chromium, *_QUIET, f"--user-data-dir={profile}", "about:blank"]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=(3, 4), preexec_fn=wire,  # noqa: PLW1509
    )  # fmt: skip
    os.close(to_read)
    os.close(from_send)
    try:
        yield Page(to_send, from_read)
    finally:
        os.close(to_send)  # a browser without its pipe ends by itself
        os.close(from_read)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@pytest.fixture(scope="session")
def tab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One tab for all tests: a browser takes seconds to start."""
    started = time.monotonic()
    with browsing(chromium, tmp_path_factory.mktemp("chromium")) as page:
        assert time.monotonic() - started < 120
        yield page
