"""A real Prometheus as a child process, configured as the example's, and what it answers."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dashboards import EXAMPLE
from fault_server import LONG, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NO_PROMTOOL = "no promtool: name it in PROMTOOL, or put it on the path"
NO_PROMETHEUS_AT_ALL = "no Prometheus: name it in PROMETHEUS, or put it on the path (Debian: prometheus)"
NO_PROMETHEUS = (
    "no Prometheus that takes OTLP (3.0 or later; Debian's does not): name it in PROMETHEUS, or put it on the path"
)
_OPTION = "--web.enable-otlp-receiver"


def promtool() -> str | None:
    """The program, where there is one."""
    return os.environ.get("PROMTOOL") or shutil.which("promtool")


def any_prometheus() -> str | None:
    """The program, where there is one."""
    return os.environ.get("PROMETHEUS") or shutil.which("prometheus")


@functools.cache
def prometheus() -> str | None:
    """The program, where there is one that takes OTLP: distributions leave that out."""
    found = any_prometheus()
    if found is None:
        return None
    reported = subprocess.run([found, "--help"], capture_output=True, text=True, check=False)
    return found if _OPTION.removeprefix("--") in reported.stdout + reported.stderr else None


def until(found: Callable[[], Any], why: Callable[[], str], seconds: float = LONG) -> Any:
    """What a call gives as soon as it gives something."""
    deadline, again = time.monotonic() + seconds, threading.Event()
    while not (answer := found()):
        assert time.monotonic() < deadline, why()
        again.wait(0.1)
    return answer


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    url: str

    @property
    def otlp(self) -> str:
        """Below which it takes OTLP."""
        return f"{self.url}/api/v1/otlp"

    def ask(self, what: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}?{query}", timeout=LONG) as answer:  # noqa: S310 - http
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        """The values that an expression has now; what is no number is none."""
        result = self.ask("query", query=expression)["result"]
        return [value for value in (float(series["value"][1]) for series in result) if value == value]  # noqa: PLR0124 - not NaN

    def is_ready(self) -> bool:
        """Whether it listens and has read what it kept."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=LONG):  # noqa: S310 - http
            return True
        return False


@contextlib.contextmanager
def running(binary: str, folder: Path, configuration: Path | None = None) -> Iterator[Prometheus]:
    """Starts it, with the example's configuration and OTLP or with another one, and waits until it is ready."""
    port, log = free_port(), folder / "prometheus.log"
    options = [
        f"--config.file={configuration or EXAMPLE / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        *(() if configuration else (_OPTION,)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen([binary, *options], stdout=output, stderr=subprocess.STDOUT, cwd=folder)
        try:
            started = Prometheus(f"http://127.0.0.1:{port}")
            until(started.is_ready, log.read_text)
            yield started
        finally:
            process.terminate()
            process.wait(LONG)
