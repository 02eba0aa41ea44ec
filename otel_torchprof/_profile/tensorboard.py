"""Traces as files where TensorBoard's profiler plugin looks for them."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def tensorboard_trace_handler(
    dir_name: str | os.PathLike[str],
    worker_name: str | None = None,
    use_gzip: bool = False,
    use_python_export: bool = False,
) -> Callable[[Any], None]:
    """For ``on_trace_ready``: writes each trace into a folder, under the names that torch's handler gives.

    The names are ``<worker>.<Unix ns>.pt.trace.json``, with ``.gz`` if asked for.

    Args:
        dir_name: made when the first trace is ready.
        worker_name: different for every process; by default host and process id.
        use_gzip: compress the files.
        use_python_export: handed on to ``export_chrome_trace``, where it has no meaning.

    Raises:
        TypeError: ``dir_name`` is no path.
        RuntimeError: (the handler) the folder cannot be made; :class:`ExportError` if the file cannot be written.
    """
    if not isinstance(dir_name, str | os.PathLike):
        raise TypeError(f"dir_name is {dir_name!r}; it must be the path of a folder")

    def handle(prof: Any) -> None:
        try:
            Path(dir_name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeError(f"Can't create directory: {dir_name}") from error
        worker = worker_name or f"{socket.gethostname()}_{os.getpid()}"
        name = f"{worker}.{time.time_ns()}.pt.trace.json" + (".gz" if use_gzip else "")
        prof.export_chrome_trace(str(Path(dir_name) / name), use_python_export=use_python_export)

    return handle
