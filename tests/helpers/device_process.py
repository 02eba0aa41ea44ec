"""Tests marked ``simulated_device`` run in a process of their own: one per file, started with the file's first such test.

That process runs all of the file's tests that this one was asked for, and hands back pytest's own reports, which are shown
here as if the tests had run here: the same names, and the same text where one fails.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import preloaded
import pytest

REPORTS = "SIMULATED_DEVICE_REPORTS"
"""Set in the process that has the device: the file that takes the reports."""

_SECONDS = 300.0
_FOUND = pytest.StashKey[dict[str, dict[str, list[Any]]]]()


def _run(items: list[pytest.Item], config: pytest.Config) -> dict[str, list[Any]]:
    """The reports of each test; for one that has none, what the process said."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reports"
        path.touch()
        done = preloaded.run(
            ("-m", "pytest"),
            *("-q", "-p", "no:cacheprovider", *(item.nodeid for item in items)),
            environment={**os.environ, REPORTS: str(path)},
            folder=config.rootpath,
            timeout=_SECONDS,
            has_package=True,
        )
        found: dict[str, list[Any]] = {}
        for line in path.read_text().splitlines():
            report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
            if isinstance(report.longrepr, list):  # of a skip: the file, the line and the reason
                report.longrepr = tuple(report.longrepr)
            found.setdefault(report.nodeid, []).append(report)
    for item in items:
        reports = found.setdefault(item.nodeid, [])
        if not reports or reports[-1].when != "teardown":
            said = f"the process with the simulated device ended with {done.returncode}\n{done.stdout[-8000:]}{done.stderr[-8000:]}"
            reports.append(pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call"))
    return found


def _reports_of(item: pytest.Item) -> list[Any]:
    files = item.config.stash.setdefault(_FOUND, {})
    file = str(item.path)
    if file not in files:
        requested = [one for one in item.session.items if one.path == item.path and _is_marked(one)]
        files[file] = _run(requested, item.config)
    return files[file][item.nodeid]


def _is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("simulated_device") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Shows what the other process found, instead of running the test."""
    if REPORTS in os.environ or not _is_marked(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.session._setupstate.teardown_exact(nextitem)  # what a test before it, which ran here, has left set up
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before this one left what the two have in common set up, and the next one may have less.
    item.session._setupstate.teardown_exact(nextitem)
    return True


class Reporter:
    """In the process that has the device: writes every report down at once, so that a crash loses none."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line each."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a") as file:
            file.write(json.dumps(data) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Called where a test session begins."""
    config.addinivalue_line("markers", "simulated_device: runs in a process that has the simulated device")
    preloaded.note_variables()
    if REPORTS in os.environ:
        config.pluginmanager.register(Reporter(config, Path(os.environ[REPORTS])))
