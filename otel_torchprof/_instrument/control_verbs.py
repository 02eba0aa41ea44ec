"""What a client can ask a running process for, and the process's control socket."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._answers.lines import text_of_call
from otel_torchprof._columns.samples import Call, is_own
from otel_torchprof._process import process_changes
from otel_torchprof._ranks.ranks import identity_in
from otel_torchprof._record.generations import shared as generations
from otel_torchprof.version import __version__

from .control import ControlSocket
from .control_dump import dump
from .control_record import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .control import Request


def status(request: Request) -> Mapping[str, Any]:
    """What the process is, and where its loop is; with ``drain``, the default, the next answer has the steps up to now."""
    running = request.running
    if request.arguments.get("drain", True):
        running.ask_drain()
    found, tokens = running.status(), generations.token_rate(time.time_ns())
    return {
        "pid": os.getpid(),
        "program": Path(sys.argv[0]).name if sys.argv else "",
        "host": platform.node(),
        "otel_torchprof": __version__,
        "time_ns": time.time_ns(),
        **{key: value for key, value in identity_in(os.environ).items() if value is not None},
        "line": _line(),
        "device_bytes": _device_bytes(),
        **found,
        "rates": {**found["rates"], **({} if tokens is None else {"tokens": tokens})},
    }


def _line() -> str:
    """The innermost line of the program that the main thread is in; empty for none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - there is no other way
    for each, line in traceback.walk_stack(frame) if frame else ():
        code = each.f_code
        if is_own(code.co_filename):
            return text_of_call(Call(Path(code.co_filename).name, line, code.co_name), "")
    return ""


def _device_bytes() -> int | None:
    """Bytes of tensors on devices, by the counters that torch's allocators have on the host; None if the process uses no device."""
    total = None
    for name in ("torch.cuda", "torch.xpu"):
        module = sys.modules.get(name)
        with suppress(AttributeError, KeyError):  # torch is being imported, or is of another version
            if module is not None and module.is_initialized():
                stats = map(module.memory_stats_as_nested_dict, range(len(module.default_generators)))
                total = (total or 0) + sum(each["allocated_bytes"]["all"]["current"] for each in stats)
    return total


socket = ControlSocket({"status": status, "record": record, "dump": dump})
"""Instance of the process."""
process_changes.at_fork(process_changes.Order.STATE, in_child=socket.after_fork_in_child)
