"""A Chromium without a window, driven over a pipe: for tests of pages."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 120.0
_WITH_PIPES = """
import fcntl, os, sys
inbox, outbox = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(inbox, 3)
os.dup2(outbox, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A page in a browser.

    Args:
        folder: for the browser's own files.
        width: of the window, in pixels.
        dark: whether the reader prefers a dark page.
    """

    def __init__(self, folder: Path, *, width: int = 1600, height: int = 1200, dark: bool = False) -> None:
        self._number, self._rest, self.requests, self.messages = 0, b"", [], []
        inbox, self._to = os.pipe()
        self._from, outbox = os.pipe()
        words = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _WITH_PIPES,
                str(inbox),
                str(outbox),
                CHROMIUM,
                *words,
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            pass_fds=(inbox, outbox),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(inbox)
        os.close(outbox)
        self._session: str | None = None
        with contextlib.ExitStack() as exits:
            exits.callback(self.close)
            self._begin(width, height, dark=dark)
            exits.pop_all()

    def _begin(self, width: int, height: int, *, dark: bool) -> None:
        [target] = [each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        self._session = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, page: Path) -> None:
        """Opens a file, and returns when it has been loaded."""
        answer = self._call("Page.navigate", url=page.as_uri())
        assert "errorText" not in answer, answer
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def wait(self, expression: str) -> None:
        """Returns when an expression is true."""
        until = time.monotonic() + SECONDS
        while not self.value(expression):
            assert time.monotonic() < until, expression

    def value(self, expression: str) -> Any:
        """The value of an expression of the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def key(self, name: str) -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def click(self, x: float, y: float) -> None:
        """Clicks at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Ends the browser."""
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self._call("Browser.close")
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                self.messages.append(answer["params"])

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        found, _, self._rest = self._rest.partition(b"\0")
        return json.loads(found)
