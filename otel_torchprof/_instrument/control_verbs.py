"""What a client can ask a running process for, and the process's control socket."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._process import process_changes
from otel_torchprof._ranks.ranks import identity_in
from otel_torchprof.version import __version__

from .control import ControlSocket
from .control_dump import dump
from .control_record import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .control import Request


def status(request: Request) -> Mapping[str, Any]:
    """What the process is, and where its loop is."""
    running = request.running
    return {
        "pid": os.getpid(),
        "program": Path(sys.argv[0]).name if sys.argv else "",
        "host": platform.node(),
        "otel_torchprof": __version__,
        "time_ns": time.time_ns(),
        **{key: value for key, value in identity_in(os.environ).items() if value is not None},
        **running.status(),
    }


socket = ControlSocket({"status": status, "record": record, "dump": dump})
"""Instance of the process."""
process_changes.at_fork(process_changes.Order.STATE, in_child=socket.after_fork_in_child)
