"""A Chrome trace in files that follow one another, each a whole document: the next begins when one is full."""

from __future__ import annotations

import glob
import math
import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof import config
from otel_torchprof._encode.chrome_spans import CLOSING, ChromeSpans
from otel_torchprof._encode.spans import SpanList, SpanParts, step_ends

from .stream import StreamedFile, is_held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from otel_torchprof._process.quiet import LimitedLog

PART = "{part}"


class Rotation(NamedTuple):
    """When the next file begins, and how many are kept; None: never, and all."""

    max_bytes: int | None = None
    """On the disk."""
    steps_per_file: int | None = None
    max_files: int | None = None

    @classmethod
    def of(cls, max_bytes: object, steps_per_file: object, max_files: object) -> Rotation:
        """As the keywords say; where one is None, as the environment does.

        Raises:
            ValueError: a bad keyword; names it, its value and what is allowed.
        """
        return cls(
            config.CHROME_MAX_BYTES.given(max_bytes),
            config.CHROME_STEPS_PER_FILE.given(steps_per_file),
            config.CHROME_MAX_FILES.given(max_files),
        )

    @property
    def rotates(self) -> bool:
        """Whether there can be a second file."""
        return self.max_bytes is not None or self.steps_per_file is not None


def part_path(path: str, part: int) -> str:
    """The name of a part: its number in place of ``{part}``, else before the suffix; six digits, so that names sort."""
    return path.replace(PART, f"{part:06}") if PART in path else before_suffix(path, f"{part:06}")


def before_suffix(path: str, text: str) -> str:
    """The same name with a text before its suffix: ``trace.json.gz`` becomes ``trace.4711.json.gz``."""
    plain = path.removesuffix(".gz")
    stem, suffix = os.path.splitext(plain)  # noqa: PTH122 - Path would lose a trailing slash
    return f"{stem}.{text}{suffix}{path[len(plain) :]}"


def own_series(path: str) -> str:
    """The path, or one with the process id in it where another process writes parts of that name: those it is done with stay too."""
    digits = "[0-9]" * 6
    escaped = glob.escape(path)
    pattern = escaped.replace(PART, digits) if PART in path else before_suffix(escaped, digits)
    return before_suffix(path, str(os.getpid())) if any(map(is_held, glob.glob(pattern))) else path  # noqa: PTH207 (of a text)


class RotatedTrace:
    """The file that is written now, and those before it. For one thread at a time.

    Args:
        path: of all of them; see :func:`part_path`. One that does not rotate has it as it is.
        rotation: when the next begins.
        log: called with each failure.
    """

    def __init__(self, path: str, rotation: Rotation, log: LimitedLog) -> None:
        self.rotation = rotation
        self._path = path
        self._log = log
        self._encoder = ChromeSpans()
        self._part = 0
        self._claimed = False
        self._steps = 0
        self._written = 0
        self._whole: deque[str] = deque()
        self.file = self._new_file()

    @property
    def files(self) -> tuple[str, ...]:
        """Those that are there, the oldest first."""
        return (*self._whole, *(() if self.file.is_empty else (self.file.path,)))

    @property
    def bytes_written(self) -> int:
        """On the disk, those of deleted files too."""
        return self._written + self.file.size

    def append(self, spans: Sequence[ReadableSpan]) -> None:
        """Writes the spans, and begins other files where they are due. Raises what :meth:`StreamedFile.append` does."""
        most = self.rotation.steps_per_file
        if most is None:
            self._append_fitting(spans)
            return
        ends = step_ends(spans)
        while isinstance(spans, SpanList) and self._steps + len(ends) >= most:
            cut = int(ends[most - self._steps - 1])
            parts = SpanParts(spans)
            if len(before := parts.between(-math.inf, cut)):
                self._append_fitting(before)
            self._begin_next()
            spans = parts.between(cut, math.inf)
            ends = step_ends(spans)
        if len(spans):
            self._append_fitting(spans)
        self._steps += len(ends)

    def close(self) -> None:
        """Ends the file. Raises OSError when the system refuses."""
        self.file.close()

    def abandon(self) -> None:
        """Lets go of the file, which is the parent's."""
        self.file.abandon()

    def _append_fitting(self, spans: Sequence[ReadableSpan]) -> None:
        """All of them into this file, or else as much of them as fits, cut where no tree is torn."""
        if self.rotation.max_bytes is None:
            self._write(spans, None)
        elif not self._write(spans, self.rotation.max_bytes):
            first, second = _halves(spans)
            if len(first) and len(second):
                self._append_fitting(first)
                self._append_fitting(second)
                return
            if not self.file.is_empty:
                self._begin_next()
            self._write(spans, None)

    def _write(self, spans: Sequence[ReadableSpan], most: int | None) -> bool:
        """Whether they fitted."""
        if self.rotation.rotates and not self._claimed:
            self._claimed = True
            self._claim(own_series(self._path))
        encoder, requested = self._encoder if most is None else self._encoder.copied(), self.file.path
        try:
            fits = self.file.append(encoder.encode(spans, begin=self.file.is_empty), most)
        except BaseException:
            self._encoder.report_again()
            raise
        if self.file.path != requested:
            self._log.warning("Chrome trace: another process writes to %r, this one to %r", requested, self.file.path)
            self._path = before_suffix(self._path, str(os.getpid()))
        if fits:
            self._encoder = encoder
            self._delete_oldest()
        return fits

    def _claim(self, path: str) -> None:
        if path != self._path:
            self._log.warning("Chrome trace: another process writes to %r, this one to %r", self._path, path)
            self._path = path
            self.file = self._new_file()

    def _begin_next(self) -> None:
        self.file.close()
        self._whole.append(self.file.path)
        self._written += self.file.size
        self._part += 1
        self._steps = 0
        self.file = self._new_file()

    def _delete_oldest(self) -> None:
        """Once the file after them is there: something of the trace always is."""
        keep = self.rotation.max_files
        while keep is not None and len(self._whole) >= keep:
            oldest = self._whole.popleft()
            try:
                Path(oldest).unlink(missing_ok=True)
            except OSError as error:
                self._log.warning("Chrome trace: the old file %r could not be deleted: %s", oldest, error)

    def _new_file(self) -> StreamedFile:
        path = part_path(self._path, self._part) if self.rotation.rotates else self._path
        return StreamedFile(path, beside=before_suffix(path, str(os.getpid())), closing=CLOSING)


def _halves(spans: Sequence[ReadableSpan]) -> tuple[Sequence[ReadableSpan], Sequence[ReadableSpan]]:
    """About half of the steps or trees, and the others; one of the two is empty where there is no more than one."""
    if not isinstance(spans, SpanList):
        return spans[: len(spans) // 2], spans[len(spans) // 2 :]
    parts = SpanParts(spans)
    cuts = parts.cuts()
    if not len(cuts):
        return spans, ()
    middle = int(cuts[len(cuts) // 2])
    return parts.between(-math.inf, middle), parts.between(middle, math.inf)
