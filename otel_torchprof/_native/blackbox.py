"""The black box: the session that writes one, the hang watch with its stacks, and the content of an image."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._process import threads
from otel_torchprof.errors import NativeError

from .ffi import ffi, lib, owner, python_sources
from .recorder import NAME_KINDS, Session, batch_of, check, current_names
from .stacks import stacks_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from otel_torchprof._columns.batch import Batch, Names
    from otel_torchprof._columns.schema import Kind

MAGIC = b"OTPBOX\n\x1a"
"""First bytes of an image (``blackbox_format.h``)."""
STACKS_BYTES: int = lib.OTP_BLACKBOX_STACKS_BYTES
"""Maximum size of Python's stacks in an image."""
THREAD_AT: int = lib.OTP_INDEX_BITS
"""The bit of an event's id from which on the id has the thread."""
_MOST_NUMBER = 1 << 63
_HANG_LINE = 1024
LONG_SECONDS = 900.0
"""Time limit of pauses in compilations, checkpoints and setup."""


class BoxSession(Session):
    """The session of a black box: its chunks are in a file, it keeps the latest, and is never drained.

    Args:
        descriptor: descriptor of the file, with all blocks allocated; may be closed after the start.
        size: size of the file in bytes.
        kinds: kinds of events to record.
        hidden: kinds of names (of ``NAME_KINDS``) to leave out of the file.
        shown: patterns of :mod:`fnmatch` for labels to write even if labels are hidden.
        hides_shapes: whether to leave out shapes of collectives.
        hides_threads: whether to leave out names of threads.
    """

    def __init__(
        self,
        descriptor: int,
        size: int,
        kinds: Iterable[Kind],
        *,
        hidden: Iterable[str] = (),
        shown: Sequence[str] = (),
        hides_shapes: bool = False,
        hides_threads: bool = False,
    ) -> None:
        options = ffi.new("otp_blackbox_options *")
        options.fd, options.bytes = descriptor, size
        options.kinds = sum(1 << kind for kind in set(kinds))
        options.hidden_names = sum(1 << NAME_KINDS.index(kind) for kind in set(hidden))
        options.hides_shapes = hides_shapes
        options.hides_threads = hides_threads
        self._shown = ffi.new("char[]", "\n".join(shown).encode(errors="surrogateescape"))
        options.shown_names = self._shown
        self._options = options
        self._native = ffi.NULL
        self._lock = threads.Lock()
        self._final = None
        self.all_threads, self.contexts, self.inputs = True, False, False

    def start(self) -> None:
        """Opens the box, and records from now on.

        Raises:
            NativeError: another one is open, 16 sessions run, the file cannot be mapped.
        """
        out = ffi.new("otp_session **")
        status = lib.otp_blackbox_open(self._options, out)
        if status == lib.OTP_E_STATE:
            raise NativeError("this process has one already")
        check(status, "opening a black box")
        self._native = out[0]
        self._owner = owner(out[0], "otp_session_free")

    def reserve(self, reserved: bool) -> None:
        """As :meth:`Session.reserve`; no effect before the start."""
        if self._native != ffi.NULL:
            super().reserve(reserved)

    @property
    def consumer(self) -> int:
        """The box's bit in the masks of sources; 0 before the start."""
        return 0 if self._native == ffi.NULL else super().consumer

    def stop(self) -> None:
        """Closes the box; without effect if it is not open.

        Raises:
            NativeError: the box belongs to the parent of this forked process.
        """
        if self._native != ffi.NULL:
            check(lib.otp_session_stop(self._native), "closing a black box")


def set_info(info: Mapping[str, Any]) -> None:
    """Replaces the process info in the open box; without effect if its JSON exceeds 8 KB. Any thread; a microsecond."""
    text = json.dumps(info).encode()
    if len(text) <= lib.OTP_BLACKBOX_INFO_BYTES:
        lib.otp_blackbox_set_info(text, len(text))


def is_lost() -> bool:
    """Whether another process truncated the file of the open box, so that events are no longer in a file."""
    return bool(lib.otp_blackbox_is_lost())


class Group(NamedTuple):
    """A process group in an image (``otp_blackbox_group``); its sends and receives form a group of their own."""

    name: str
    ranks: str
    """Global ranks, separated by commas; empty where it is all of them."""
    backend: str
    size: int
    rank: int
    """Rank of the process in the group."""
    is_transfers: bool
    is_tracked: bool
    """Whether the backend reports completed collectives."""
    enqueued: int
    completed: int
    last_enqueued: int
    """Sequence number; -1 for none."""
    last_completed: int


class Collective(NamedTuple):
    """A collective of an image, a send or a receive (``otp_blackbox_collective``)."""

    name: str
    group: str
    ranks: str
    dtype: str
    reduce_op: str
    sequence_nr: int
    """-1 for none."""
    bytes_in: int
    bytes_out: int
    root: int
    peer: int
    tag: int
    is_transfer: bool
    is_async: bool
    has_failed: bool
    is_tracked: bool
    os_tid: int
    """System id of the thread that enqueued it."""
    enqueued_ns: int
    """Unix ns."""
    completed_ns: int
    """Likewise; 0: not complete, or not known."""
    timeout_ns: int = 0
    """0: not known."""
    shapes: str = ""
    """Shapes of the inputs, as ``[[3, 4]]``; cut after some hundred characters in a black box."""
    started_ns: int = -1
    """Start on the device according to PyTorch's flight recorder, Unix ns; 0: not started; -1: not known."""

    @property
    def is_pending(self) -> bool:
        """Whether it is known not to be complete."""
        return self.is_tracked and not self.completed_ns


class Contents(NamedTuple):
    """Contents of an image (``otp_blackbox_contents``)."""

    events: Callable[[int], Iterator[Batch]]
    """Iterates from the first event over all intact events, in batches of the given number of bytes of records (0: one batch),
    each up to its watermark. The last batch has the events that were open at the end, with the flag ``UNFINISHED``."""
    pid: int
    is_closed: bool
    """Whether its process has ended it."""
    last_ns: int
    """Unix ns of the last that is known of the process."""
    chunks: int
    """Number of chunks with records."""
    chunks_damaged: int
    """Number of these chunks that could not be read to their end."""
    names_left_out: int
    dropped: int
    """Events that found no chunk."""
    groups: Sequence[Group]
    collectives: Sequence[Collective]
    """The last collectives of all groups, in the order in which they were enqueued."""
    info: Mapping[str, str | int | None]
    """The process info; empty if unreadable, with None for values that are neither text nor number."""
    hang_since_ns: int = 0
    """Unix ns since which a thread hung; 0 if none did."""
    hang_os_tid: int = 0
    stacks: str = ""
    """Python's stacks of all threads at the end; empty if they could not be written."""
    complete_since_ns: int = 0
    """Unix ns up to which events have given way to later ones, about as exactly as a chunk is long; 0 if none have."""

    @property
    def batch(self) -> Batch:
        """All events as one batch; may need gigabytes."""
        return next(self.events(0))


def read_image(image: bytes | memoryview) -> Contents:
    """Reads an image in memory, as :func:`read_file`."""
    return ImageReader(-1, image, len(image)).read()


def read_file(file: BinaryIO) -> Contents:
    """Reads an image in a file, whose content is not trusted; the file may be closed afterwards.

    Costs some tens of nanoseconds per event, now and in each iteration of ``events``; its names stay in the process.

    Raises:
        NativeError: it is not an image, or of another version.
    """
    return ImageReader.of_file(file).read()


class ImageReader:
    """Reads an image, again and again while its process writes it. Not thread-safe.

    Args:
        descriptor: a file, which may be closed after the first reading; -1: the image is in ``source``.
        source: the image, if it is in memory.
        size: of the image in bytes.
    """

    def __init__(self, descriptor: int, source: Any, size: int) -> None:
        self._image = descriptor, source, size
        self._raw: Any = None
        self._owner: object = None
        self._info: tuple[bytes, Mapping[str, Any]] = b"", {}
        """The info of the latest reading, as JSON and parsed."""

    @classmethod
    def of_file(cls, file: BinaryIO) -> ImageReader:
        """A reader of an image in a file."""
        return cls(file.fileno(), b"", os.fstat(file.fileno()).st_size)

    def read(self, since: int = 0) -> Contents:
        """Reads the image; the ``events`` of earlier readings can then no longer be read.

        With ``since``, Unix ns, reads only the chunks with what ended since then or is open, and collectives that were enqueued, completed or
        pending since: then the cost depends on what is new, not on the size of the image.

        Raises:
            NativeError: it is not an image, or of another version.
        """
        descriptor, source, size = self._image
        if self._raw is None:
            out = ffi.new("otp_blackbox_contents **")
            data = ffi.NULL if descriptor >= 0 else ffi.from_buffer(source)
            check(lib.otp_blackbox_read(descriptor, data, size, since, out), "reading a black box")
            self._raw = out[0]
            self._owner = (owner(out[0], "otp_blackbox_contents_free"), source, data)  # native code reads the image
        else:
            check(lib.otp_blackbox_refresh(self._raw, since), "reading a black box")
        raw, names = self._raw, current_names()
        info = bytes(ffi.buffer(raw.info, raw.info_size))
        if info != self._info[0]:
            self._info = info, _info(info)
        return Contents(
            _Events(raw, self._owner),
            int(raw.pid),
            bool(raw.is_closed),
            int(raw.last),
            int(raw.chunks),
            int(raw.chunks_damaged),
            int(raw.names_left_out),
            int(raw.dropped),
            [_group(raw.groups[i], names) for i in range(raw.group_count)],
            [_collective(raw.collectives[i], names) for i in range(raw.collective_count)],
            self._info[1],
            int(raw.hang_since),
            int(raw.hang_os_tid),
            bytes(ffi.buffer(raw.stacks, raw.stacks_size)).decode("utf-8", "replace"),
            int(raw.complete_since),
        )


class _Events:
    """The events of an image; supports one iteration at a time, as a new one ends the previous one."""

    def __init__(self, raw: Any, owned: object) -> None:
        self._raw = raw
        self._owned = owned  # kept alive

    def __call__(self, max_bytes: int) -> Iterator[Batch]:
        lib.otp_blackbox_rewind(self._raw)
        is_last = False
        while not is_last:
            out = ffi.new("otp_batch **")
            check(lib.otp_blackbox_next(self._raw, max_bytes, out), "reading a black box")
            batch = batch_of(out[0])
            is_last = batch.is_last
            yield batch


def _group(raw: Any, names: Names) -> Group:
    return Group(
        names[raw.group],
        names[raw.ranks],
        names[raw.backend],
        raw.group_size,
        raw.rank,
        bool(raw.flags & lib.OTP_BLACKBOX_TRANSFER),
        not raw.flags & lib.OTP_BLACKBOX_UNTRACKED,
        raw.enqueued,
        raw.completed,
        raw.last_enqueued,
        raw.last_completed,
    )


def _collective(raw: Any, names: Names) -> Collective:
    call = raw.call
    return Collective(
        names[call.name],
        names[call.group],
        names[call.ranks],
        names[call.dtype],
        names[call.reduce_op],
        call.sequence_nr,
        call.bytes_in,
        call.bytes_out,
        call.root,
        call.peer,
        call.tag,
        bool(call.flags & lib.OTP_BLACKBOX_TRANSFER),
        bool(call.flags & lib.OTP_BLACKBOX_ASYNC),
        bool(call.flags & lib.OTP_BLACKBOX_FAILED),
        not call.flags & lib.OTP_BLACKBOX_UNTRACKED,
        raw.os_tid,
        raw.enqueued,
        raw.completed,
        call.timeout_ms * 10**6,
        ffi.string(call.shapes).decode("ascii", "replace"),
    )


def _info(text: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # damaged or missing
        return {}
    return {key: _sound(value) for key, value in document.items()} if isinstance(document, dict) else {}


def _sound(value: Any) -> str | int | None:
    """Returns a text, made encodable, or a number of 64 bits; None for other values."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return value if type(value) is int and -_MOST_NUMBER <= value < _MOST_NUMBER else None


def stacks_writer() -> int:
    """Returns the address of the function that writes the stacks of all threads, for :func:`start_hang_watch`.

    Raises:
        NativeError: the stacks cannot be read here.
    """
    problem = stacks_problem()
    if problem is not None:
        raise NativeError(problem)
    return python_sources.stacks_writer()


class HangOptions(NamedTuple):
    """What the hang watch does (``hang_watch.h``)."""

    seconds: float
    """Limit of a pause."""
    write_stacks: int
    """Result of :func:`stacks_writer`, or 0."""
    command: Sequence[bytes] = ()
    """Program that writes the report to its stdout, with its arguments; empty: none."""
    report: bytes = b""
    """File of the report."""
    exit_status: int = 0
    """Status with which the process ends; 0: it continues."""


def start_hang_watch(options: HangOptions) -> None:
    """Starts the hang watch.

    Raises:
        NativeError: a watch is running already, or no thread could be created.
    """
    words = [ffi.new("char[]", word) for word in options.command]
    command = ffi.new("char *[]", [*words, ffi.NULL])
    report = ffi.new("char[]", options.report)
    raw = ffi.new(
        "otp_hang_options *",
        {
            "limit_ns": round(options.seconds * 1e9),
            "long_limit_ns": round(max(options.seconds, LONG_SECONDS) * 1e9),
            "write_stacks": options.write_stacks,
            "command": command,
            "report": report,
            "exit_status": options.exit_status,
        },
    )
    check(lib.otp_hang_watch_start(raw), "watching for hangs")


def next_hang() -> tuple[int, str]:
    """Waits, without the GIL, for a hang; returns the system's id of the thread, and what was written to stderr; 0 after the watch stopped."""
    line = ffi.new(f"char[{_HANG_LINE}]")
    os_tid = int(lib.otp_hang_watch_wait(line, _HANG_LINE))
    return os_tid, ffi.string(line).decode("utf-8", "replace")


def hang_was_logged() -> None:
    """Lets a process that is to end do so."""
    lib.otp_hang_watch_logged()


def stop_hang_watch() -> None:
    """Stops the hang watch; repeated calls have no effect."""
    lib.otp_hang_watch_stop()
