"""The library that records torch's operators: loads and probes it, and reads recorded inputs and collectives."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import os
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.schema import COLLECTIVE_COLUMNS
from otel_torchprof._process import process_changes, threads
from otel_torchprof._process.after_import import is_there
from otel_torchprof.errors import TorchLibraryError, TorchProfError, warn_once

from . import prebuilt, torch_build
from .device_timing import DeviceTiming
from .ffi import ffi, lib
from .record_function_fast import fast_records
from .recorder import CHUNK_BYTES, Session
from .torch_functions import TorchFunctions

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_torchprof._columns.batch import Batch


Array = npt.NDArray[Any]

# ---- Inputs, read natively over whole columns; thread-safe, without the GIL ----


STORAGE = np.dtype(
    [
        ("address", np.uint64),
        ("bytes", np.uint64),
        ("row", np.int64),
        ("input", np.int32),
        ("device_type", np.uint8),
        ("device_index", np.uint8),
        ("reserved", np.uint16),
    ]
)
"""``otp_storage``: memory that a tensor among a row's inputs is in, and which of the inputs that is."""


_ALL_KEPT = 0xFFFFFFFF


class InputWords:
    """Words and, per row, the offset among them, both int64 (``otp_inputs``)."""

    def __init__(self, words: Array, offsets: Array) -> None:
        words, offsets = np.ascontiguousarray(words, dtype=np.int64), np.ascontiguousarray(offsets, dtype=np.int64)
        self._alive = words, offsets
        self._native = ffi.new("otp_inputs *")
        self._native.words, self._native.word_count = ffi.from_buffer("int64_t[]", words), len(words)
        self._native.offsets, self._native.row_count = ffi.from_buffer("int64_t[]", offsets), len(offsets)

    def numbers(self, parts: int, names: Array | None = None) -> tuple[npt.NDArray[np.int32], int]:
        """A number from 0 per row, equal where parts (``otp_input_part``) and names are, and how many numbers there are.

        Raises:
            MemoryError: there is none left.
        """
        numbers = np.empty(self._native.row_count, dtype=np.int32)
        given = ffi.NULL
        if names is not None:
            names = np.ascontiguousarray(names, dtype=np.uint32)
            given = ffi.from_buffer("uint32_t[]", names)
        count = lib.otp_inputs_number(self._native, given, parts, ffi.from_buffer("int32_t[]", numbers))
        if count < 0:
            raise MemoryError("no memory to tell the inputs of events apart")
        return numbers, int(count)

    def storages(self) -> Array:
        """The storages of all rows' inputs, as an array of :data:`STORAGE`, by row."""
        storages = np.empty(lib.otp_inputs_storages(self._native, ffi.NULL), dtype=STORAGE)
        lib.otp_inputs_storages(self._native, ffi.cast("otp_storage *", storages.ctypes.data))
        return storages

    def text_ids(self, kind: int) -> npt.NDArray[np.uint32]:
        """Per row, the name of its first extra of a kind, or of its first string; 0 for none."""
        ids = np.zeros(self._native.row_count, dtype=np.uint32)
        lib.otp_inputs_texts(self._native, kind, ffi.from_buffer("uint32_t[]", ids))
        return ids

    def kept(self, what: int) -> tuple[Array, Array] | None:
        """New words and offsets with only that much of the inputs (``otp_input_kept``); None where that is all of them."""
        size = self._keep(what)
        if what and size == self._keep(_ALL_KEPT):
            return None
        words = np.empty(size, dtype=np.int64)
        offsets = np.empty(self._native.row_count, dtype=np.int64)
        self._keep(what, ffi.from_buffer("int64_t[]", words), ffi.from_buffer("int64_t[]", offsets))
        return words, offsets

    def _keep(self, what: int, words: Any = ffi.NULL, offsets: Any = ffi.NULL) -> int:
        places = np.full(self._native.word_count, -2, dtype=np.int64)
        count: int = lib.otp_inputs_keep(self._native, what, ffi.from_buffer("int64_t[]", places), words, offsets)
        return count


def input_type_name(header: int) -> str:
    """Torch's name of an input's type, from the input's header."""
    name: bytes = ffi.string(lib.otp_input_type_name(header))
    return name.decode()


# ---- Collectives ----


MOST_COLLECTIVES = 1 << 16
"""Collectives of one recording that may wait to be taken: 5 MB."""

COLLECTIVE_ENTRY = np.dtype([(column.name, column.dtype) for column in COLLECTIVE_COLUMNS])
"""``otp_collective``."""
_ROOM, _FIRST_ROOM = 4096, 32
"""Entries that are asked for at once: most programs have none, and more memory comes from the system, and is zeroed."""

Collectives = dict[str, "npt.NDArray[Any]"]
"""Arrays of :data:`~otel_torchprof._columns.schema.COLLECTIVE_COLUMNS`."""


class Collecting:
    """The collectives of one session, from now until :meth:`stop` or until nothing refers to it any more. Thread-safe.

    Raises:
        TorchLibraryError: torch refused.
    """

    def __init__(self, functions: TorchFunctions, session: Session, most: int = MOST_COLLECTIVES) -> None:
        self._ffi, self._native = functions.ffi, functions.lib
        self._token = int(self._native.otp_torch_collectives_start(session.consumer, most))
        if self._token == 0:
            raise TorchLibraryError("torch refused to report collectives")
        self._dropped = 0
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _stop, self._native, self._token, self._pid)
        self._finalizer.atexit = False

    def take(self) -> Collectives:
        """Collectives that were not taken before, unordered; empty after the stop."""
        take = self._native.otp_torch_collectives_take
        parts = _taken("otp_collective[]", COLLECTIVE_ENTRY, self._ffi, lambda out, room: take(self._token, out, room))
        if not len(parts[0]):
            return no_collectives()
        entries = np.concatenate(parts)
        return {column.name: np.ascontiguousarray(entries[column.name]) for column in COLLECTIVE_COLUMNS}

    @property
    def lost(self) -> int:
        """Number of collectives dropped for lack of room."""
        if self._finalizer.alive:
            self._dropped = int(self._native.otp_torch_collectives_lost(self._token))
        return self._dropped

    def stop(self) -> Collectives:
        """Ends it, and gives the rest; none in a forked child, and when called again."""
        if not self._finalizer.alive:
            return no_collectives()
        rest, self._dropped = self.take(), self.lost
        _stop(self._native, self._token, self._pid)
        self._finalizer.detach()
        return rest


COLLECTIVE_TIME = np.dtype(
    [("start", np.int64), ("end", np.int64), ("group", np.uint32), ("reserved", np.uint32)], align=True
)
"""``otp_collective_time``: Unix ns, and the id of the group's name."""


class CollectiveTiming:
    """Times collectives of this process, from now until :meth:`stop`; one object at a time. Thread-safe.

    Only those that no rank leaves before the last has arrived, of backends that report their end (gloo). Costs some microseconds
    each. Of more than ``most`` that wait to be taken, the oldest are dropped.

    Raises:
        TorchLibraryError: torch refused.
    """

    def __init__(self, functions: TorchFunctions, most: int) -> None:
        self._ffi, self._native = functions.ffi, functions.lib
        self._pid = os.getpid()
        if not self._native.otp_torch_collectives_time(most):
            raise TorchLibraryError("torch refused to report collectives")

    def take(self) -> npt.NDArray[Any]:
        """The complete ones that were not taken before, as :data:`COLLECTIVE_TIME`, in the order of their ends."""
        take = self._native.otp_torch_collectives_take_times
        return np.concatenate(_taken("otp_collective_time[]", COLLECTIVE_TIME, self._ffi, take))

    def stop(self) -> None:
        """Ends it and drops the rest; no effect in a forked child, where nothing is timed."""
        if os.getpid() == self._pid:
            self._native.otp_torch_collectives_time(0)


def no_collectives() -> Collectives:
    """None."""
    return dict(_NONE)


_NONE: Collectives = {column.name: np.empty(0, column.dtype) for column in COLLECTIVE_COLUMNS}


def _taken(kind: str, dtype: npt.DTypeLike, ffi: Any, take: Callable[[Any, int], int]) -> list[npt.NDArray[Any]]:
    """All entries of a native queue, in one array or several. ``take``: moves so many at most to an address, and returns how many."""
    parts: list[npt.NDArray[Any]] = []
    room = _FIRST_ROOM
    while not parts or len(parts[-1]) == room:
        room = _ROOM if parts else _FIRST_ROOM
        part = np.empty(room, dtype=dtype)
        parts.append(part[: int(take(ffi.from_buffer(kind, part), room))])
    return parts


def _stop(native: Any, token: int, pid: int) -> None:
    if os.getpid() == pid:
        native.otp_torch_collectives_stop(token)


# ---- The library ----


def installed_torch() -> Any | None:
    """Imports and returns torch; None if it is not installed."""
    # Checked without an import first: an import takes the module's lock even if there is no torch, and a child that was forked while
    # another thread held it would wait forever.
    if not is_there("torch"):
        return None
    try:
        import torch
    except ImportError:
        return None
    # A folder named torch on the path is imported as an empty package.
    return torch if hasattr(torch, "__version__") else None


class Requested(enum.IntFlag):
    """Facts that an observer can request for operators: ``otp_torch_requests``."""

    INPUTS = 1
    OVERLOADS = 2
    CALL_STACKS = 4
    MODULE_HIERARCHY = 8
    STORAGES = 16
    DEVICES = 32


class Observation:
    """An observer registered with torch until :meth:`stop`, or until this object is freed."""

    ever_requested: ClassVar[Requested] = Requested(0)
    """All facts about inputs requested so far in this process; records have no others, except arguments of labels."""

    def __init__(self, functions: TorchFunctions, session: Session, requested: Requested) -> None:
        Observation.ever_requested |= requested & ~Requested.DEVICES
        handle = functions.ffi.new("uint64_t *")
        self._parts = functions.lib, handle, os.getpid()
        self._finalizer = weakref.finalize(self, _unobserve, *self._parts)  # first: the start may be interrupted
        functions.lib.otp_torch_observe(session.consumer, session.all_threads, requested, handle)
        if handle[0] == 0:
            raise TorchLibraryError("torch refused to register an observer of its operators")
        fast_records.follow(handle[0], functions, with_inputs=bool(requested & Requested.INPUTS))

    def stop(self) -> None:
        """Removes the observer; no effect in a forked child and for repeated calls.

        If another thread has registered it, the observer removes itself when that thread next runs an operator; until then
        it records nothing.
        """
        _unobserve(*self._parts)
        self._finalizer.detach()


def _unobserve(library: Any, handle: Any, pid: int) -> None:
    # Not in a child, which would wait forever if another thread held torch's lock at the fork.
    if os.getpid() == pid:
        fast_records.leave(handle[0])
        library.otp_torch_unobserve(handle[0])


class MemoryObservation:
    """Records a thread's allocations and releases for a session, until :meth:`stop` or until this object is freed."""

    def __init__(self, library: Any, session: Session, token: int) -> None:
        self._parts = library, session.consumer, token, os.getpid()
        self._finalizer = weakref.finalize(self, _unobserve_memory, *self._parts)
        self.was_cut = False
        """Whether the stop found that torch had ended it before."""

    def stop(self) -> None:
        """Stops recording. Thread-safe; no effect in a forked child and for repeated calls."""
        self.was_cut |= not _unobserve_memory(*self._parts)
        self._finalizer.detach()


def _unobserve_memory(library: Any, consumer: int, token: int, pid: int) -> bool:
    return os.getpid() != pid or bool(library.otp_torch_unobserve_memory(consumer, token))


_OCCUPIED = (
    "memory cannot be recorded on this thread: another profiler of torch's (torch.profiler, torch.autograd.profiler or "
    "emit_nvtx) is running on it, and torch tells only one of what it allocates. Stop that one first, or record without "
    "profile_memory"
)


class TorchLibrary:
    """The loaded library."""

    def __init__(self, path: Path, opened: Callable[[Path], int] = torch_build.open_private) -> None:
        self.path = path
        self.functions = _attached(_open(path, opened), path)

    def observe(self, session: Session, requested: Requested | None = None) -> Observation:
        """Records operators for a running session: those of the calling thread and of threads that work for it, or all.

        ``requested``: facts to record; by default the inputs that the session stores.

        Raises:
            TorchLibraryError: torch refused the observer.
        """
        if requested is None:
            requested = Requested.INPUTS if session.inputs else Requested(0)
        return Observation(self.functions, session, requested)

    def observe_memory(self, session: Session) -> MemoryObservation:
        """Records allocations and releases for a running session: on the calling thread and where torch carries its state.

        Raises:
            TorchProfError: a torch profiler is running on the thread.
            TorchLibraryError: torch refused, or the library was built without this part.
        """
        if not self.functions.reports_memory:
            raise TorchLibraryError(torch_build.why_left_out(self.path, "torch/memory.cc"))
        native = self.functions.lib
        token = int(native.otp_torch_observe_memory(session.consumer))
        if token == native.OTP_TORCH_MEMORY_OCCUPIED:
            raise TorchProfError(_OCCUPIED)
        if token <= 0:
            raise TorchLibraryError("torch refused to report what it allocates")
        return MemoryObservation(native, session, token)

    def time_devices(self, session: Session, device: str, events: str, most: int) -> DeviceTiming:
        """Times a running session's events on devices of a type (``"cuda"``): see :class:`DeviceTiming`.

        The library of the device must have been initialised.

        Raises:
            TorchProfError: the device cannot be timed, and why.
        """
        if not self.functions.times_devices:
            raise TorchLibraryError(torch_build.why_left_out(self.path, "torch/devices.cc"))
        return DeviceTiming(self.functions, session, device, events, most)

    def collect_devices(self, wait: float) -> int:
        """Reads device times for all sessions, as :meth:`DeviceTiming.collect`."""
        return int(self.functions.lib.otp_torch_devices_collect(int(wait * 1e9))) if self.functions.times_devices else 0

    def report_collectives(self, session: Session, most: int) -> Collecting:
        """Reports a running session's collectives; ``most``: limit of buffered ones. See :class:`Collecting`.

        Raises:
            TorchLibraryError: torch was built without distributed, or this part does not compile against it.
        """
        return Collecting(self._with_collectives(), session, most)

    def time_collectives(self, most: int = MOST_COLLECTIVES) -> CollectiveTiming:
        """Times collectives; ``most``: limit of buffered ones. See :class:`CollectiveTiming`.

        Raises:
            TorchLibraryError: as :meth:`report_collectives`.
        """
        return CollectiveTiming(self._with_collectives(), most)

    def _with_collectives(self) -> TorchFunctions:
        if not self.functions.reports_collectives:
            raise TorchLibraryError(torch_build.why_left_out(self.path, torch_build.COLLECTIVES))
        return self.functions

    def hold_devices(self, captures: int) -> None:
        """Sets the number of streams being captured. Unless it is 0, no timing event is recorded or queried."""
        if self.functions.times_devices:
            self.functions.lib.otp_torch_devices_hold(captures)


def _name_of(descriptor: int, path: Path) -> str:
    """Name by which ``dlopen`` loads the file of a descriptor; the path if there is no /proc, as on macOS.

    Contains the process id instead of ``self``, since debuggers and symbolizers open the name of a library too.
    """
    with contextlib.suppress(OSError):
        name = f"/proc/{Path('/proc/self').readlink()}/fd/{descriptor}"
        if os.path.samestat(os.stat(name), os.fstat(descriptor)):  # noqa: PTH116 - both by number
            return name
    return str(path)


def _open(path: Path, opened: Callable[[Path], int]) -> int:
    """Loads the checked file, even if its path has been replaced since; returns the handle.

    The descriptor stays open: ``dlopen`` identifies libraries by name, and would return this one for a later file of that name.
    """
    descriptor, name = None, str(path)
    try:
        descriptor = opened(path)
        name = _name_of(descriptor, path)
        # Never unloaded, not even at interpreter exit: torch keeps pointers to its functions.
        return int(ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NODELETE)._handle)  # noqa: SLF001 - as ctypes documents it
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        raise TorchLibraryError(
            f"{path} could not be loaded ({str(error).replace(name, path.name)}); remove the file, it will be built again"
        ) from error


def _attached(handle: int, path: Path) -> TorchFunctions:
    """The library's functions, once it has the recorder."""
    functions = TorchFunctions(handle)
    native = functions.lib
    api = functions.ffi.cast("otp_api *", int(ffi.cast("uintptr_t", lib.otp_get_api())))
    if native.otp_torch_attach(api) != 0:
        raise TorchLibraryError(f"{path} was built for another version of otel-torchprof; remove the file")
    _name_dtypes(functions)
    if functions.reports_memory:
        native.otp_torch_attach_memory(api)
    if functions.reports_collectives:
        native.otp_torch_attach_collectives(api)
    if functions.times_devices:
        native.otp_torch_attach_devices(api)
        process_changes.before_exit(native.otp_torch_devices_exit)
    return functions


def _name_dtypes(functions: TorchFunctions) -> None:
    """Adds torch's names of types that are newer than the recorder's own table."""
    for number in itertools.count():
        name = functions.lib.otp_torch_dtype_name(number)
        if not name:
            return
        lib.otp_set_dtype_name(number, functions.ffi.string(name))


_FLOAT_2D = 1 | (6 + 1) << 8 | 2 << 32
"""The header of a contiguous tensor of floats with two dimensions: see otp_input_kind."""


class _ProbingThread(threads.local):
    probes = False


_thread = _ProbingThread()


class _NotTriedError(TorchLibraryError):
    """The trial could not be made: that says nothing about the library."""


def _probe(torch: Any, library: TorchLibrary) -> None:
    """Records one operator and reads its name and its input's shape back.

    A library built with other flags than torch may load and read the wrong fields. Runs on a thread of its own, so that a
    profiler, dispatch mode or default device of the caller has no effect.
    """
    batches: list[Batch] = []
    errors: list[BaseException] = []

    def record() -> None:
        _thread.probes = True
        lib.otp_mute_thread()  # other recordings must not contain it
        try:
            batches.append(_recorded_negation(torch, library))
        except BaseException as error:  # noqa: BLE001 - even a finalizer's SystemExit: raised in the caller's thread
            errors.append(error)

    thread = threads.Thread(target=record, name="otel-torchprof-probe")
    try:
        thread.start()
    except RuntimeError as error:
        raise _NotTriedError(f"the library was loaded, but no thread could be started to try it: {error}") from error
    thread.join()
    if not batches:
        raise _NotTriedError(f"the library was loaded, but recording one operator failed: {errors[0]}") from errors[0]
    batch = batches[0]
    names = [batch.names[index] for index in batch["name"]]
    if "aten::neg_" not in names:
        raise TorchLibraryError(f"the library was loaded, but recorded {names} where aten::neg_ ran")
    # If other sessions requested storages and overloads, the words have them too.
    all_words: Array = np.empty(0, np.int64) if batch.inputs is None else batch.inputs
    reduced = InputWords(all_words, batch["inputs"]).kept(lib.OTP_KEEP_INPUTS)
    words, offsets = (all_words, batch["inputs"]) if reduced is None else reduced
    shape = words[offsets[names.index("aten::neg_")] :][:4]
    if not np.array_equal(shape, [1, _FLOAT_2D, 2, 3]):
        raise TorchLibraryError(f"the library was loaded, but read a float of shape (2, 3) as {shape.tolist()}")


def _recorded_negation(torch: Any, library: TorchLibrary) -> Batch:
    session = Session(CHUNK_BYTES, inputs=True)
    session.start()
    observation = library.observe(session)
    with torch.no_grad():
        torch.empty((2, 3), device="cpu", dtype=torch.float).neg_()
    observation.stop()
    session.stop()
    return session.final_batch()


def _prebuilt(torch: Any) -> TorchLibrary | None:
    """Returns the library shipped for this torch, if there is one, and it loads and records correctly."""
    path = prebuilt.find(torch)
    if path is None:
        return None
    try:
        library = TorchLibrary(path, lambda path: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        _probe(torch, library)
    except _NotTriedError:
        raise
    except TorchLibraryError as error:  # for example, an incompatible C library
        warn_once(f"{error}; it came with the package, so one is built here instead")
        return None
    return library


_EXPENSIVE_SECONDS = 1.0
_BACKOFF = 100
"""After a failed attempt longer than :data:`_EXPENSIVE_SECONDS`, none is made for this many times its duration: attempts so take at most 1 %
of the time."""


class _Loading:
    """Loads the library once per process, on one thread at a time; others wait for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threads.RLock()
        self._ident = 0
        """Ident of the loading greenlet if threads are greenlets, else of the thread."""
        self._loaded: TorchLibrary | None = None
        self._failure, self._next_attempt = "", 0.0
        process_changes.watch(self)

    def library(self, torch: Any) -> TorchLibrary:
        """Returns the library; loads it on the first call.

        Raises:
            TorchLibraryError: it cannot be built or loaded now.
        """
        lock = self._lock
        while self._is_other_greenlets(lock):
            threads.let_greenlets_run()
        if self._loaded is not None:
            return self._loaded
        if lock._is_owned() or _thread.probes:  # type: ignore[attr-defined]  # noqa: SLF001 - as threads.Condition asks
            raise TorchLibraryError(
                "the library that records torch's operators is being loaded by the code that this call has interrupted (a finalizer "
                "or a signal handler): record after that, or record labels alone, profile(operators=False)"
            )
        with lock:
            if self._loaded is None:
                self._ident = threads.get_greenlet_ident()
                try:
                    self._loaded = self._attempt(torch)
                finally:
                    self._ident = 0
            return self._loaded

    def _is_other_greenlets(self, lock: Any) -> bool:
        """Whether another greenlet of this thread is loading: greenlets switch while it waits, at least for a lock of cffi."""
        return lock._is_owned() and self._ident not in {0, threads.get_greenlet_ident()}  # noqa: SLF001 - as threads.Condition asks

    def _attempt(self, torch: Any) -> TorchLibrary:
        begin = self._clock()
        if begin < self._next_attempt:
            raise TorchLibraryError(
                f"{self._failure}\nNot tried again for another {self._next_attempt - begin:.0f} s, unless in a new process."
            )
        try:
            return _load(torch)
        except TorchLibraryError as error:
            end = self._clock()
            if end - begin > _EXPENSIVE_SECONDS:
                self._failure, self._next_attempt = str(error), end + _BACKOFF * (end - begin)
            raise

    def after_fork_in_child(self) -> None:
        """Renews the lock: another thread of the parent may have been loading."""
        self._lock = threads.RLock()


_loading = _Loading()


def _load(torch: Any) -> TorchLibrary:
    library = _prebuilt(torch)
    if library is None:
        library = TorchLibrary(torch_build.ensure(torch))
        _probe(torch, library)
    return library


def is_built(torch: Any) -> bool:
    """Whether :func:`load` need not build the library."""
    return prebuilt.find(torch) is not None or torch_build.is_whole(
        torch_build.folder() / torch_build.library_name(torch)
    )


def load() -> TorchLibrary:
    """Returns the library, built and loaded on first use.

    Raises:
        TorchLibraryError: torch is missing, or the library cannot be built or loaded; the message names the fix.
    """
    torch = installed_torch()
    if torch is None:
        raise TorchLibraryError(
            "torch is not installed, so there are no operators to record: install it; a profile of labels alone is "
            "profile(operators=False)"
        )
    return _loading.library(torch)
