"""A device that does not exist, registered with torch as PrivateUse1, whose time the test holds in its hands.

Its memory is the host's and its kernels run on the CPU at once; what a device would be busy with afterwards is a queue of
items per stream, each with a duration (5 us where nothing else is said). Three ways of time:

- ``instant()`` (after ``reset()``): everything has completed as soon as it is enqueued, and its times are exact;
- ``automatic()``: items complete as the machine's clock goes;
- ``manual()``: nothing completes until ``complete``, ``complete_all``, ``advance`` or somebody who synchronises says so.

Registering it changes torch for the whole process and cannot be undone: see ``run_on_device`` and the marker
``simulated_device`` in tests/conftest.py, which runs the tests of a file in a process of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import preloaded

from otel_torchprof._native import torch_build

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NAME = "privateuseone"
"""Torch's own name for it. The backend is renamed to the name that it has: only a backend that has been renamed is an
accelerator, without which there is no backward pass; and under this name torch's own profiler stays as it is."""

COUNTS = (
    "created",
    "created_timed",
    "destroyed",
    "records",
    "records_timed",
    "queries",
    "elapsed",
    "synchronizes",
    "waits",
    "stream_queries",
    "kernels",
    "allocations",
    "frees",
    "violations",
    "failures",
)
FAILURES = (
    "record",
    "query",
    "elapsed",
    "block",
    "synchronize",
    "query_stream",
    "is_capturing",
    "get_stream",
    "get_device",
)
"""What can be made to throw. Destroying an event cannot: torch's interface forbids it."""


def _library(torch: Any) -> Path:
    """The compiled device, kept by what it depends on, in a folder that nobody else can write to."""
    sources = [HERE / "simulated_device.cc", HERE / "simulated_kernels.cc"]
    digest = hashlib.sha256(torch_build.library_name(torch).encode() + str(HERE).encode())
    for path in (*sources, *sorted(HERE.glob("simulated_*.h"))):
        digest.update(path.read_bytes())
    target = torch_build.folder() / "tests" / f"simulated_device-{digest.hexdigest()[:16]}.so"
    torch_build._make_folder(target.parent)
    with torch_build._build_lock(target):
        if not torch_build.is_whole(target):
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                output = Path(folder) / target.name
                failed = torch_build._make(
                    torch_build.BuildTarget.of(torch), [[path] for path in sources], output, lighter=False
                )
                assert failed is None, failed
                torch_build._digest_file(target).write_text(torch_build._digest(output))
                output.replace(target)
    return target


def _declared(library: Any) -> Any:
    """Says what does not return an int."""
    for name in ("complete", "count", "alive", "alive_most", "memory", "pending", "time", "new_stream"):
        getattr(library, f"simulated_{name}").restype = ctypes.c_int64
    for name in ("exchange_stream", "current_stream", "violations"):
        getattr(library, f"simulated_{name}").restype = ctypes.c_int64
    return library


class SimulatedDevice:
    """The test's side of the device. Streams are torch's (``torch.Stream``), or None for the current one."""

    def __init__(self, torch: Any, library: Path) -> None:
        self._torch = torch
        self._native = _declared(ctypes.CDLL(str(library)))
        self.name = NAME

    def _key(self, stream: Any) -> tuple[ctypes.c_int, ctypes.c_int64]:
        if stream is None:
            index = self._native.simulated_current_device()
            return ctypes.c_int(index), ctypes.c_int64(self._native.simulated_current_stream(index))
        return ctypes.c_int(stream.device_index), ctypes.c_int64(stream.stream_id)

    def reset(self) -> None:
        """As it was at the beginning: instant, all work done, nothing counted; events and tensors stay what they are."""
        self._native.simulated_reset()

    def instant(self) -> None:
        """Everything completes as soon as it is enqueued; the clock stands still unless ``advance`` moves it."""
        self._native.simulated_mode(0)

    def automatic(self) -> None:
        """Work completes as the machine's clock goes."""
        self._native.simulated_mode(1)

    def manual(self) -> None:
        """Nothing completes by itself."""
        self._native.simulated_mode(2)

    def complete(self, stream: Any = None, n: int = -1) -> int:
        """Completes the next items (kernels, marks, waits) of a stream, by default all; returns how many did."""
        return int(self._native.simulated_complete(*self._key(stream), ctypes.c_int64(n)))

    def complete_all(self) -> None:
        """Completes everything on all streams."""
        self._native.simulated_complete_all()

    def advance(self, ns: int) -> None:
        """Moves the clock, and completes what has ended by then."""
        self._native.simulated_advance(ctypes.c_int64(ns))

    @property
    def time(self) -> int:
        """The device's clock, in ns since ``reset``."""
        return int(self._native.simulated_time())

    def duration(self, ns: int, operator: str = "") -> None:
        """How long kernels take from now on: all, or those of one operator (``aten::mm``)."""
        self._native.simulated_duration(operator.encode(), ctypes.c_int64(ns))

    def kernel(self, name: str = "kernel", device: int = 0) -> None:
        """Enqueues work on the current stream as an operator would."""
        self._native.simulated_kernel(name.encode(), device)

    def pending(self, stream: Any = None) -> int:
        """How many items of a stream have not completed."""
        return int(self._native.simulated_pending(*self._key(stream)))

    def new_stream(self, device: int = 0) -> Any:
        """A stream of its own."""
        return self._torch.Stream(device=f"{NAME}:{device}")

    @contextlib.contextmanager
    def stream(self, stream: Any = None, device: int = 0) -> Iterator[Any]:
        """Makes a stream, by default a new one, this thread's current one on its device."""
        stream = stream or self.new_stream(device)
        index, number = self._key(stream)
        before = self._native.simulated_exchange_stream(index, number)
        try:
            yield stream
        finally:
            self._native.simulated_exchange_stream(index, ctypes.c_int64(before))

    @contextlib.contextmanager
    def capture(self, stream: Any = None) -> Iterator[None]:
        """The stream captures, as for a graph: work on it does not run, and whoever asks after an event violates it."""
        key = self._key(stream)
        self._native.simulated_capture(*key, 1)
        try:
            yield
        finally:
            self._native.simulated_capture(*key, 0)

    def unused(self, device: int = 0) -> None:
        """The device tells torch until ``reset`` that nobody has used it in this process."""
        self._native.simulated_unused(device)

    @contextlib.contextmanager
    def stall(self, thread: int) -> Iterator[None]:
        """That thread (``threading.get_native_id()``) waits where it next records an event, as where the queue of a device is full."""
        self._native.simulated_stall(ctypes.c_int64(thread))
        try:
            yield
        finally:
            self._native.simulated_stall(ctypes.c_int64(0))

    def stalled_calls(self) -> int:
        """How often a thread has had to wait so, ever."""
        self._native.simulated_stalled_calls.restype = ctypes.c_int64
        return int(self._native.simulated_stalled_calls())

    def fail(self, what: str, text: str = "the simulated device failed", times: int = -1) -> None:
        """Lets the next calls of one of ``FAILURES`` throw: all from now on, or a number; 0 ends it."""
        assert what in FAILURES, f"{what}: not one of {FAILURES}"
        self._native.simulated_fail(what.encode(), text.encode(), ctypes.c_int64(times))

    def counts(self, thread: int | None = None) -> dict[str, int]:
        """What was counted since ``reset``, of all threads or of one (``threading.get_native_id()``).

        For all threads also ``alive`` (events), ``alive_most`` and ``memory`` (bytes).
        """
        number = ctypes.c_int64(-1 if thread is None else thread)
        found = {name: int(self._native.simulated_count(i, number)) for i, name in enumerate(COUNTS)}
        if thread is None:
            for name in ("alive", "alive_most", "memory"):
                found[name] = int(getattr(self._native, f"simulated_{name}")())
        return found

    def violations(self) -> list[str]:
        """What nobody may do, and somebody did."""
        text = ctypes.create_string_buffer(1 << 16)
        self._native.simulated_violations(text, ctypes.c_int64(len(text)))
        return text.value.decode().splitlines()


def _module(torch: Any, native: Any) -> Any:
    """``torch.privateuseone``, as far as torch and profilers ask it."""

    def index(device: Any) -> int:
        found = torch.device(device).index if isinstance(device, str | torch.device) else device
        return int(native.simulated_current_device() if found is None else found)

    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 2
    module.current_device = native.simulated_current_device
    module.set_device = lambda device: native.simulated_set_device(index(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index(device))
    module.current_stream = lambda device=None: torch.Stream(
        stream_id=native.simulated_current_stream(index(device)), device_index=index(device), device_type=20
    )
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.Stream = functools.partial(torch.Stream, device=NAME)
    module.Event = functools.partial(torch.Event, device=NAME)
    return module


@functools.cache
def device() -> SimulatedDevice:
    """The device, registered in this process when first called.

    That has to be before the first backward pass of the process, since torch starts its threads for devices once.
    """
    import torch

    made = SimulatedDevice(torch, _library(torch))
    torch._C._rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(torch, made._native))
    made.reset()
    return made


def run_on_device(script: str, *, anew: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, where ``sim`` is the device and ``torch`` is imported.

    Args:
        script: what it runs.
        anew: in an interpreter that is started for it, and not in a fork of one that has imported torch and this package.
        environment: variables besides those of this process.
    """
    path = os.pathsep.join((str(ROOT), str(HERE)))
    program = f"import torch\nfrom simulated_device import device\nsim = device()\n{script}"
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    if not anew:
        return preloaded.run(program, environment=variables, has_package=True)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables, check=False)
