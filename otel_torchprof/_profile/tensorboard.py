"""``tensorboard_trace_handler``: writes traces where TensorBoard's profiler plugin looks for them."""

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
    """Returns a handler for ``on_trace_ready`` that writes each trace into a folder, under torch's file names.

    The names are ``<worker>.<Unix ns>.pt.trace.json``, with ``.gz`` on request. Same arguments as torch's function.

    Args:
        dir_name: path of the folder, which the first trace creates.
        worker_name: name that is unique per process. Default: host name and process id.
        use_gzip: whether to compress the files. Default: False.
        use_python_export: passed to ``export_chrome_trace``, where it has no effect.

    Raises:
        TypeError: ``dir_name`` is not a path.
        RuntimeError: (the handler) the folder cannot be created; :class:`ExportError` if the file cannot be written.

    Examples:
        >>> import os
        >>> with otp.profile(on_trace_ready=otp.tensorboard_trace_handler("log", "worker0")):
        ...     y = torch.ones(3) + 1
        >>> os.listdir("log")
        ['worker0....pt.trace.json']
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
