"""The answer to ``otel-torchprof dump``: what each thread of this process does now."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._answers.dumped import ProcessDump, threads_of
from otel_torchprof._columns.samples import Call
from otel_torchprof._files.box import latest_events
from otel_torchprof._process.threads import NAME
from otel_torchprof._ranks.ranks import identity_in

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from .control import Request

_MOST_CALLS = 512
_NO_BOX = "open operators, modules and phases are not known without a black box: OTEL_TORCHPROF_BLACKBOX=ops"


def dump(request: Request) -> Mapping[str, Any]:
    """Returns the stacks and open events of all threads but this package's own. Some 10 us per thread and call."""
    names = {thread.ident: thread for thread in list(threading._active.values())}  # type: ignore[attr-defined]  # noqa: SLF001 - without its lock
    stacks = {}
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - there is no other way to all threads
        thread = names.get(ident)
        is_main = thread is threading.main_thread()  # whose native_id is the parent's after a fork
        name = "main" if is_main else thread.name if thread else f"thread {ident}"
        if not name.startswith(NAME):
            stacks[os.getpid() if is_main else (thread.native_id if thread else None) or 0, name] = _calls(frame)
    contents = latest_events()
    status = request.running.status()
    notes = [] if contents is not None else [_NO_BOX]
    if status.get("step") is not None and status.get("step_end_ns"):
        notes.append(_steps(status, time.time_ns()))
    program = Path(sys.argv[0]).name if sys.argv else ""
    rank = identity_in(os.environ).get("rank")
    rank_now = rank if isinstance(rank, int) else None
    threads_now = threads_of(os.getpid(), stacks, contents)
    return ProcessDump(os.getpid(), program, rank_now, time.time_ns(), threads_now, notes).plain()


def _steps(status: Mapping[str, Any], now: int) -> str:
    """Which step had ended when steps were read, which a drain does every five seconds: a later one may have."""
    read = status["steps_read_ns"]
    ago, before = max(now - read, 0) / 1e9, max(read - status["step_end_ns"], 0) / 1e9
    return (
        f"steps were read {ago:.1f} s ago: the latest, {status['step']}, had ended {before:.1f} s before that; "
        f"a step takes {status['step_seconds']:.2g} s"
    )


def _calls(frame: FrameType) -> list[Call]:
    """The calls of a stack, the outer ones first; of a deep one, the innermost calls."""
    calls = []
    for each, line in traceback.walk_stack(frame):
        calls.append(Call(each.f_code.co_filename, line, each.f_code.co_name))
        if len(calls) == _MOST_CALLS:
            break
    return calls[::-1]
