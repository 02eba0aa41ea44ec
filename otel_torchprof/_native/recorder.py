"""The native recorder, typed: sessions, their batches, the clock."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from otel_torchprof._columns.batch import Array, Batch, KnownNames, Names, OpenEvents, RecordedThread
from otel_torchprof._process import threads
from otel_torchprof.errors import NativeError

from .ffi import ffi, lib, owner

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from otel_torchprof._columns.schema import Kind

LOSS_REASONS: tuple[str, ...] = ("budget", "evicted", "depth", "no_memory", "deadline")
"""Names of ``otp_loss``, in its order."""

NAME_KINDS: tuple[str, ...] = ("operators", "functions", "labels", "texts")
"""Kinds of names, each with a limit of its own (``otp_name_kind``, in its order); texts are the arguments of labels."""

CHUNK_BYTES: int = lib.OTP_CHUNK_BYTES
"""The unit in which memory budgets are charged."""

SLICE_BYTES = 8 << 20
"""Bytes of records drained at a time while a recording runs: about 170,000 events. This bounds the memory of a drain. A drain calls
Python some 9,000 times, however few events it has, and holds the GIL meanwhile: with slices of 2 MiB steps of small operators took
45 % longer than without a recording, with these 31 %, for 55 MB more of memory."""

CONTEXT_MUTED: int = lib.OTP_CONTEXT_MUTED
"""The context in which sessions that follow contexts record nothing (an unsampled request, suppressed instrumentation)."""


def check(status: int, what: str) -> None:
    """Turns a native status into an exception.

    Raises:
        NativeError: names the attempted operation and the core's message.
    """
    if status < 0:
        error = NativeError(f"{what}: {ffi.string(lib.otp_status_text(status)).decode()}")
        error.status = status
        raise error


def now_ns() -> int:
    """The recorder's clock, Unix nanoseconds: the clock of the events."""
    return int(lib.otp_now_ns())


def expect_contexts() -> None:
    """Reports that an application span may be current; until then, omitted events are not checked for an enclosing span.

    Thread-safe; costs some 100 ns.
    """
    lib.otp_expect_contexts()


class RecorderStats(NamedTuple):
    """Statistics of the recorder (``otp_recorder_stats``)."""

    sessions: int
    threads: int
    chunk_bytes: int
    names: int
    names_refused: dict[str, int]
    """Uses of names above the limit of their kind, which share a name: by :data:`NAME_KINDS`, those that there were."""
    clock_steps: int
    unmatched_ends: int
    clock_is_tsc: bool
    forks: int


def recorder_stats() -> RecorderStats:
    """Returns counts of the whole process. Holds the registry's lock for microseconds. Thread-safe."""
    stats = ffi.new("otp_recorder_stats *")
    lib.otp_get_recorder_stats(stats)
    figures: dict[str, Any] = {name: getattr(stats, name) for name in RecorderStats._fields}
    figures["names_refused"] = {
        kind: count for kind, count in zip(NAME_KINDS, stats.names_refused, strict=True) if count
    }
    figures["clock_is_tsc"] = bool(stats.clock_is_tsc)
    return RecorderStats(**figures)


def notes_on_names(before: Mapping[str, int] | None = None) -> list[str]:
    """Notes about names missing because there were too many; ``before``: ``names_refused`` at the begin of counting."""
    notes = []
    for kind, count in recorder_stats().names_refused.items():
        new = count - (before or {}).get(kind, 0)
        if new:
            notes.append(f"{new} {kind} are named '(other {kind})': the process has more names of {kind} than are kept")
    return notes


class SessionStats(NamedTuple):
    """Figures of one session (``otp_session_stats``)."""

    recorded: int
    """Events drained so far."""
    dropped: dict[str, int]
    """Events lost, by reason; reasons without a loss are not in it."""
    bytes_buffered: int
    bytes_buffered_max: int
    start_ns: int
    stop_ns: int


class _View:
    """Native memory as numpy sees it; keeps its owner alive as long as an array refers to it."""

    def __init__(self, address: int, count: int, dtype: np.dtype[Any], owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (count,),
            "typestr": dtype.str,
            "version": 3,
        }


def _view(address: int, count: int, dtype: np.dtype[Any], owner: Any) -> Array:
    if count == 0:
        return np.empty(0, dtype)
    return np.asarray(_View(address, count, dtype, owner))


_known: tuple[int, KnownNames] = 0, KnownNames()
"""Address of the recorder's names, and cached results about them; a forked child has other names at another address."""


def current_names() -> Names:
    """Returns the names so far as a view of the recorder's memory, without a copy."""
    global _known  # noqa: PLW0603 - there is one table per process
    raw = ffi.new("otp_names *")
    lib.otp_names_view(raw)
    address, of_ends = int(ffi.cast("uintptr_t", raw.data)), int(ffi.cast("uintptr_t", raw.ends))
    if _known[0] != address:
        _known = address, KnownNames()
    ends = _view(of_ends, raw.count, np.dtype(np.uint64), None)
    return Names(_view(address, int(ends[-1]), np.dtype(np.uint8), None), ends, known=_known[1])


def living_threads() -> list[threading.Thread]:
    """Returns the threads of :mod:`threading`, without its lock.

    ``threading.enumerate()`` allocates while it holds the lock, so a finalizer may run. One that stops a recording may wait for another
    thread that stops it, which would wait for the lock (found by ``make stress``).
    """
    return list(threading._active.copy().values())  # type: ignore[attr-defined]  # noqa: SLF001 - an atomic copy


def _native_id(thread: threading.Thread) -> int | None:
    return getattr(thread, "native_id", None)  # threads of eventlet have none


class _ThreadNames:
    """Names of Python's threads, including ended ones.

    Stored by ident, which bounds their number. Idents are reused, so the system's id is stored too: otherwise threads of
    torch's pools would get the names of ended Python threads.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[int | None, str]] = {}

    def refresh(self) -> None:
        """Adds the names of the living threads."""
        for thread in living_threads():
            if thread.ident:
                self._names[thread.ident] = _native_id(thread), thread.name

    def get(self, ident: int, os_tid: int, system_name: str) -> str:
        """Returns Python's name of the thread, else the system's."""
        native_id, name = self._names.get(ident, (None, ""))
        return name if native_id == os_tid else system_name


_thread_names = _ThreadNames()


def thread_known_by(ident: int, os_tid: int) -> RecordedThread | None:
    """Describes a living thread without recorded events, as in batches.

    Args:
        ident: its ``threading.get_ident()``.
        os_tid: the system's id; if 0, returns None for a thread that :mod:`threading` does not know.
    """
    # Not from the stored names: an ended thread may have had the ident.
    os_tid = os_tid or next((_native_id(t) or 0 for t in living_threads() if t.ident == ident), 0)
    return RecordedThread(os_tid, ident, 0, _thread_names.get(ident, os_tid, "")) if os_tid else None


def _threads(raw: Any) -> tuple[RecordedThread, ...]:
    return tuple(
        RecordedThread(
            os_tid=int(t.os_tid),
            ident=int(t.ident),
            torch_tid=int(t.source_tid),
            name=_thread_names.get(int(t.ident), int(t.os_tid), ffi.string(t.name).decode("utf-8", "replace")),
        )
        for t in (raw.threads[i] for i in range(raw.thread_count))
    )


class _Column(NamedTuple):
    """A column of ``otp_batch`` (``otp_column``); where its address and its number of entries stand there, in words."""

    group: int
    name: str
    dtype: np.dtype[Any]
    pointer: int
    entries: int


def batch_columns() -> list[_Column]:
    """Returns the columns that a drain may fill, in the core's order."""
    count = ffi.new("uint32_t *")
    raw = lib.otp_batch_columns(count)
    return [
        _Column(
            c.group,
            ffi.string(c.name).decode(),
            np.dtype(ffi.string(c.dtype).decode()),
            c.offset // _WORD,
            c.count // _WORD,
        )
        for c in (raw[i] for i in range(count[0]))
    ]


_WORD = 8
_COLUMNS = batch_columns()


def batch_of(raw: Any) -> Batch:
    """Wraps a native batch, and takes ownership of it."""
    owned = owner(raw, "otp_batch_free")
    words = np.frombuffer(ffi.buffer(raw), np.uint64).tolist()
    groups: list[dict[str, Array]] = [{} for _ in range(lib.OTP_COLUMN_GROUPS)]
    for column in _COLUMNS:
        if words[column.pointer]:
            view = _view(words[column.pointer], words[column.entries], column.dtype, owned)
            groups[column.group][column.name] = view
    outer = groups[lib.OTP_COLUMNS_OUTER]
    return Batch(
        groups[lib.OTP_COLUMNS_EVENTS] | groups[lib.OTP_COLUMNS_INPUTS] | groups[lib.OTP_COLUMNS_CONTEXTS],
        current_names(),
        _threads(raw),
        inputs=groups[lib.OTP_COLUMNS_INPUT_WORDS].get("input_words"),
        memory=groups[lib.OTP_COLUMNS_MEMORY] or None,
        dropped=_by_reason(raw.dropped),
        watermark=int(raw.watermark),
        outer_rows=outer["row"],
        outer_parents=outer["parent"],
        opens=OpenEvents(**groups[lib.OTP_COLUMNS_OPEN]),
    )


def _by_reason(counts: Any) -> dict[str, int]:
    return {reason: int(counts[i]) for i, reason in enumerate(LOSS_REASONS) if counts[i]}


class Session:
    """One recording from start to stop: its request, and the events recorded for it.

    Thread-safe; every call costs microseconds, except :meth:`drain`, which costs some tens of nanoseconds per event and
    releases the GIL meanwhile.

    Args:
        budget_bytes: memory limit, in chunks of :data:`CHUNK_BYTES`.
        keep_newest: at the limit, drop the oldest events instead of new ones.
        all_threads: record every thread instead of the starting one and those that sources add.
        inputs: record the inputs that sources report (shapes).
        kinds: kinds of events to record; default: all.
        memory: record allocations and releases; not together with ``contexts``.
        contexts: record the current span of events: batches have the column ``context``, and events that begin in
            :data:`CONTEXT_MUTED` are left out.
    """

    # A dict, which can be copied atomically; a WeakSet cannot be iterated while another thread adds to it.
    _unread: ClassVar[dict[int, weakref.ref[Session]]] = {}

    def __init__(
        self,
        budget_bytes: int,
        *,
        keep_newest: bool = False,
        all_threads: bool = False,
        inputs: bool = False,
        memory: bool = False,
        devices: bool = False,
        kinds: Iterable[Kind] = (),
        contexts: bool = False,
    ) -> None:
        options = ffi.new("otp_session_options *")
        options.budget_bytes = budget_bytes
        options.full_policy = lib.OTP_FULL_DROP_OLDEST if keep_newest else lib.OTP_FULL_DROP_NEWEST
        options.all_threads = all_threads
        options.inputs = inputs
        options.memory = memory
        options.devices = devices
        options.kinds = sum(1 << kind for kind in set(kinds))
        options.contexts = contexts
        out = ffi.new("otp_session **")
        check(lib.otp_session_new(options, out), f"a recording with a budget of {budget_bytes} bytes")
        self._native = out[0]
        self._owner = owner(out[0], "otp_session_free")
        self._final: Batch | None = None
        self._lock = threads.Lock()
        self.all_threads = all_threads
        self.contexts = contexts
        self.inputs = inputs

    def start(self) -> None:
        """Starts recording, with the calling thread in scope.

        Raises:
            NativeError: started before, or 16 other sessions are running.
        """
        _thread_names.refresh()
        status = lib.otp_session_start(self._native)
        # A stopped session occupies a slot until its events are read, so this reads those of such sessions. The loop may free
        # slots in another way too: a garbage collection during it frees unreferenced sessions.
        for reference in self._unread.copy().values():
            if status != lib.OTP_E_TOO_MANY_SESSIONS:
                break
            if (session := reference()) is not None:
                with contextlib.suppress(
                    NativeError
                ):  # it belongs to the parent of this forked child, or is being read
                    session.final_batch()
            status = lib.otp_session_start(self._native)
        check(status, "starting a recording")

    def mute_roots(self, muted: bool) -> None:
        """Sets whether events that begin outside of any span are omitted. May be called before the start.

        Does not affect open events. Thread-safe; no effect if the session has no contexts or has stopped.

        Raises:
            NativeError: the session belongs to the parent of this forked process.
        """
        check(lib.otp_session_mute_roots(self._native, muted), "muting what has no span around it")

    def reserve(self, reserved: bool) -> None:
        """Reserves or releases the bit of a stopped session: while reserved, no other session gets it, since sources may still use it.

        Thread-safe, in any state; no effect in a forked child.
        """
        lib.otp_session_reserve(self._native, reserved)

    @property
    def consumer(self) -> int:
        """The session's bit in the masks of sources; 0 before the start."""
        return int(lib.otp_session_consumer(self._native))

    def stop(self) -> None:
        """Stops recording; open events end now and are marked unfinished. No effect if it does not run.

        Raises:
            NativeError: the session belongs to the parent of this forked process.
        """
        check(lib.otp_session_stop(self._native), "stopping a recording")
        _thread_names.refresh()
        if self.consumer:  # it was started
            self._unread[id(self)] = weakref.ref(self, _forget_unread)

    def drain(self, max_bytes: int = 0) -> Batch:
        """Returns the events since the last drain; open events stay for a later one.

        Args:
            max_bytes: limit of the record bytes, the oldest first; ``Batch.watermark`` is the time up to which events are complete. 0: no limit.

        Raises:
            NativeError: the session is not started, being drained by another thread, or of the parent process.
        """
        _thread_names.refresh()
        out = ffi.new("otp_batch **")
        check(lib.otp_session_drain(self._native, max_bytes, out), "reading a recording")
        batch = batch_of(out[0])
        if batch.is_last:  # stopped and drained completely
            self._unread.pop(id(self), None)
        return batch

    def discard(self) -> None:
        """Drops the events that were not drained before the stop; the next drain counts them as dropped: ``deadline``.

        Raises:
            NativeError: the session is running, being drained by another thread, or of the parent process.
        """
        check(lib.otp_session_discard(self._native), "throwing away the rest of a recording")
        self._unread.pop(id(self), None)

    def final_batch(self) -> Batch:
        """Returns all events of a stopped session that was never drained; always the same object."""
        with self._lock:
            if self._final is None:
                self._final = self.drain()
            return self._final

    def after_fork_in_child(self) -> None:
        """Renews the lock in a forked child, where its holder may not exist."""
        self._lock = threads.Lock()

    def stats(self) -> SessionStats:
        """Returns the counts so far.

        Raises:
            NativeError: the session belongs to the parent of this forked process.
        """
        raw = ffi.new("otp_session_stats *")
        check(lib.otp_session_get_stats(self._native, raw), "asking a recording for its figures")
        return SessionStats(
            recorded=int(raw.recorded),
            dropped=_by_reason(raw.dropped),
            bytes_buffered=int(raw.bytes_buffered),
            bytes_buffered_max=int(raw.bytes_buffered_max),
            start_ns=int(raw.start_ns),
            stop_ns=int(raw.stop_ns),
        )


def _forget_unread(reference: weakref.ref[Session]) -> None:
    unread = Session._unread  # noqa: SLF001 - same module
    for key in [key for key, known in unread.copy().items() if known is reference]:
        unread.pop(key, None)
