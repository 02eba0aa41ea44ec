"""pytest plugin: fails a test if the steps of a program are slower than in an earlier recording.

In ``conftest.py``: ``pytest_plugins = ["otel_torchprof.pytest_plugin"]``. In a test::

    def test_training_step(no_slower):
        with no_slower(over=0.05) as prof:
            for _ in range(60):
                train_step()
                prof.step()
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import pytest

from ._answers.diff import diff
from ._profile.profile import profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    NoSlower = Callable[..., AbstractContextManager[profile]]

FOLDER = ".torch_baselines"
"""Folder beside pytest's configuration file; its files are valid for one machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--record-baselines``."""
    parser.getgroup("otel_torchprof").addoption(
        "--record-baselines",
        action="store_true",
        help="record what no_slower compares with anew, instead of comparing",
    )


@pytest.fixture
def no_slower(request: pytest.FixtureRequest) -> NoSlower:
    """Returns a context manager that records steps and fails the test if they are slower: ``no_slower(over=0.05)``.

    It yields a :class:`~otel_torchprof.profile`, whose ``step()`` ends a step; at least 25 are needed. The first run,
    and each run with ``--record-baselines``, records a baseline trace in ``.torch_baselines``; later runs write the
    latest trace beside it and compare both. The test fails by the rule of ``otel-torchprof diff --fail-over``: the
    changes make steps slower by more than ``over``, a fraction (0.05 by default). The message lists the changes.
    A test that cannot be judged, as on a machine that is faster or slower than with the baseline, is skipped with the reason.
    """
    name = re.sub(r"[^\w.=-]+", "_", request.node.nodeid)
    before, latest = (request.config.rootpath / FOLDER / f"{name}{kind}.json.gz" for kind in ("", ".latest"))

    @contextlib.contextmanager
    def recording(over: float = 0.05) -> Iterator[profile]:
        with profile() as prof:
            yield prof
        before.parent.mkdir(exist_ok=True)
        if request.config.getoption("--record-baselines") or not before.exists():
            prof.export_chrome_trace(before)
            request.node.add_report_section("call", "no_slower", f"recorded {before}, to compare with from now on")
            return
        prof.export_chrome_trace(latest)
        _compare(before, latest, over)

    return recording


def _compare(before: Path, latest: Path, over: float) -> None:
    difference = diff(before, latest)
    if not difference.can_judge(over):
        pytest.skip(str(difference))
    if difference.is_slower_by(over):
        pytest.fail(
            f"what is listed adds {difference.slowdown:.1%} to a step of {before}, which --record-baselines records anew\n{difference}",
            pytrace=False,
        )
