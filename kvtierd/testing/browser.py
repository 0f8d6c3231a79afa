"""A real Chromium without a window, driven over its DevTools pipe; no package is needed for that."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
PATIENCE = 20.0
LAUNCH = 40.0


class Browser:
    """One page of one browser. ``complaints``: what its console, its policy or the network had to say.

    Raises:
        FileNotFoundError: there is no browser on this machine.
    """

    def __init__(self, profile: Path) -> None:
        path = next(filter(None, map(shutil.which, NAMES)), None)
        if path is None:
            raise FileNotFoundError(f"none of {', '.join(NAMES)} is here: install Debian's package chromium")
        ours, self._write = os.pipe()
        self._read, theirs = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4.
        command = f'exec 3<&{ours} 4>&{theirs} {ours}<&- {theirs}>&-; exec "$0" "$@"'
        options = [*OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(  # noqa: S603 - a browser of this machine, found by its name
            ["/bin/bash", "-c", command, path, *options],
            pass_fds=(ours, theirs),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours)
        os.close(theirs)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requested: list[str] = []
        try:
            targets = self.call("Target.getTargets", patience=LAUNCH)["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *, patience: float = PATIENCE, **params: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + patience
        while True:
            reply = self._next(deadline)
            if reply.get("id") == self._number:
                assert "error" not in reply, (method, reply["error"])
                result: dict[str, Any] = reply["result"]
                return result
            self._note(reply)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0, "the browser does not answer"
            if select.select([self._read], [], [], left)[0]:
                data = os.read(self._read, 1 << 16)
                assert data, "the browser ended"
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        event: dict[str, Any] = json.loads(line)
        return event

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(params["args"])[:500])
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])

    def look(self, *, width: int, height: int, dark: bool) -> None:
        """Choose the size of the window and the colours that the user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """Return the value of a script's expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str, until: Callable[[Any], object] = bool) -> Any:
        """Wait until an expression has a value that will do; return it."""
        deadline = time.monotonic() + PATIENCE
        while not until(value := self.ask(expression)):
            assert time.monotonic() < deadline, f"{expression} stays {value!r}; {self.complaints}"
            select.select([self._read], [], [], 0.05)
        return value

    def picture(self, path: Path) -> None:
        """Save what is to be seen of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._write)
        os.close(self._read)
