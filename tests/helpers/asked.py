"""A question to one process over its control socket, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_torchprof._cli.control_client import ControlCall, Process, ask_each
from otel_torchprof._process.control_wire import ControlError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def ask(
    process: Process | None, verb: str, arguments: Mapping[str, Any] | None = None, files: Sequence[int] = ()
) -> Mapping[str, Any]:
    """Returns the result of a verb; raises its ControlError."""
    assert process is not None
    answer = ask_each([ControlCall(process, verb, arguments or {}, files)])[0]
    if isinstance(answer, ControlError):
        raise answer
    return answer
