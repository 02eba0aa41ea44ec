"""The verb ``record``: records steps of a running process into a file that the client has opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_torchprof._export import file
from otel_torchprof._export.formats import TRACES, endings_help, format_of
from otel_torchprof._native import torch_library
from otel_torchprof._process import threads
from otel_torchprof._process.control_wire import ControlError
from otel_torchprof.errors import TorchProfError

from .step_choice import StepRequest
from .step_recording import StepRecording, check_torch, in_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from .control import Connection, Request

_PROGRESS_SECONDS = 0.5


def record(request: Request) -> dict[str, Any] | None:
    """Records steps, and writes them into the descriptor that came with the request, on threads that end with it.

    Arguments: those of :class:`StepRequest`, and ``name``, the name of the file, which decides about its format. With ``prepare``, only
    loads what a recording needs, so that it begins at once. With ``end_at``, only ends the recording in progress of the client with that
    ``shared``, with a step that all ranks keep, and ``why``.

    Raises:
        TorchProfError: it cannot begin; the message says why.
    """
    arguments = dict(request.arguments)
    name = str(arguments.pop("name", ""))
    if arguments.pop("prepare", False):
        connection = request.take()
        _in_background(lambda: _prepare(connection))
        return None
    if isinstance(end := arguments.get("end_at"), int):
        in_progress.end_at(str(arguments.get("shared")), end, str(arguments.get("why")))
        return {}
    format_name = format_of(name, TRACES)
    if format_name is None:
        raise ControlError(f"{name!r:.100} names no format: {endings_help(TRACES)}")
    if len(request.files) != 1:
        raise ControlError(f"{len(request.files)} files came with the request: one is needed")
    recording = _begun(request.running, arguments)
    connection = request.take()
    _in_background(lambda: _serve(connection, recording, name, format_name))
    return None


def _begun(running: Any, arguments: dict[str, Any]) -> StepRecording:
    try:
        recording = StepRecording(running, StepRequest.checked(**arguments))
    except (TypeError, ValueError) as error:
        raise ControlError(str(error)) from error
    recording.start()
    return recording


def _in_background(function: Callable[[], None]) -> None:
    threads.Thread(target=function, name="otel-torchprof-control", daemon=True).start()


def _prepare(connection: Connection) -> None:
    try:
        check_torch()
        torch_library.load()
    except TorchProfError as error:
        connection.end(None, str(error))
    else:
        connection.end({})


def _serve(connection: Connection, recording: StepRecording, name: str, format_name: str) -> None:
    """Reports progress until the recording is done, then writes it; if the client leaves, ends the recording and writes nothing."""
    is_there = True
    while not recording.wait(_PROGRESS_SECONDS):
        found = {} if recording.found is None else dict(zip(("found", "why"), recording.found, strict=True))
        state = {"state": recording.state, "steps": recording.ended_steps, **found}
        is_there = is_there and connection.progress(state)
        if not is_there or connection.has_left():
            is_there = False
            recording.cancel()
    closed = "" if connection.files[0].is_own else "other code of the program has closed the file"
    if recording.error or closed or not is_there:
        connection.end(None, recording.error or closed)
        return
    try:
        connection.progress({"state": "writing", "steps": recording.ended_steps})
        written = file.write_descriptor(connection.files[0].number, name, recording.pieces(format_name))
        connection.end(_result(recording, written))
    except Exception as error:  # noqa: BLE001 - told to the client
        connection.end(None, f"the file is incomplete: {error}")


def _result(recording: StepRecording, written: int) -> dict[str, Any]:
    steps, health = recording.steps, recording.health
    return {
        "first_step": steps[0].number if steps else None,
        "steps": len(steps),
        "events": health.recorded,
        "dropped": sum(health.dropped.values()),
        "bytes": written,
        "is_cut": recording.is_cut,
        "notes": health.notes,
    }
