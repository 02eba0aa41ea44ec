"""JSON that is not trusted, read value by value: whatever the document, no more than one small value of it is in memory."""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any

from .byte_stream import UnexpectedError, cut_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LARGEST_VALUE = 1 << 20
"""Characters of the largest parsed value. Its Python objects take up to 30 bytes per character, and the text four."""
_SPACE = re.compile(r"[ \t\r\n]*")
_SPACE_AND_COMMAS = re.compile(r"[ \t\r\n,]*")
_OUTSIDE_STRINGS = re.compile(r'[^"]*')
_NESTING = re.compile(r"[\[\]{}]")
_SCALAR = re.compile(r'[^ \t\r\n,:"\[\]{}]*')
_IN_STRING = re.compile(r'[^"\\]*')
_decode = json.JSONDecoder().raw_decode


class UnusableError(ValueError):
    """A value that cannot be used; reading continues after it."""


class JsonStream:
    """A JSON document. In an iteration over members or elements, take or skip each value before the next one.

    Raises UnexpectedError if the text is not JSON.

    Args:
        read: returns the next bytes, none at the end.
        offset: position of the first byte in the file.
    """

    def __init__(self, read: Callable[[], bytes], offset: int = 0) -> None:
        self._read = read
        # So that bytes which are no UTF-8 can be counted in the text, and are shown as escapes.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self._at = 0
        self._before = offset
        """Offset of the text's begin in the file."""
        self._begun = ("", 0, offset)

    @property
    def offset(self) -> int:
        """Offset of the next byte; costs 5 us if the text is not ASCII."""
        return self._before + _size(self._text, self._at)

    @property
    def value_offset(self) -> int:
        """Begin of the value that was read last."""
        text, at, before = self._begun
        return before + _size(text, at)

    def peek(self) -> str:
        """The next character that is no white space; the empty text at the end."""
        return self._next(_SPACE)

    def members(self) -> Iterator[str]:
        """The names of an object's members."""
        self._expect("{")
        while (char := self._next(_SPACE_AND_COMMAS)) != "}":
            if char != '"':
                raise self._unexpected("a member of an object, or its end")
            name = self.value()
            self._expect(":")
            yield name
        self._at += 1

    def elements(self) -> Iterator[None]:
        """Yields once per element of an array."""
        self._expect("[")
        while (char := self._next(_SPACE_AND_COMMAS)) != "]":
            if not char:
                raise self._unexpected("an element of an array, or its end")
            yield
        self._at += 1

    def value(self) -> Any:
        """The next value.

        Raises:
            UnusableError: it is too large, nested too deeply, or has a number of too many digits; it was passed over.
        """
        if self._at == len(self._text) or self._text[self._at] in " \t\r\n":
            self._next(_SPACE)
        while True:
            self._begun = self._text, self._at, self._before
            try:
                content, end = _decode(self._text, self._at)
            except json.JSONDecodeError as error:
                further = error.pos - self._at
                if len(self._text) - self._at > LARGEST_VALUE:
                    self._skip_unusable(f"a value of more than {LARGEST_VALUE} characters")
                elif not self._more():
                    raise self._no_value(f"{error.msg}, {further} characters further on") from error
            except RecursionError:
                self._skip_unusable("a value that is nested too deeply")
            except ValueError:  # Python's limit, which an option of the interpreter's would raise
                self._skip_unusable("a number of too many digits")
            else:
                if end == len(self._text) and self._more():  # of a number there may be more
                    continue
                self._at = end
                return content

    def skip(self) -> None:
        """Passes over a value of any size and depth."""
        depth = 0
        while True:
            char = self._next(_SPACE)
            if not char or (not depth and char in "]},:"):
                raise self._unexpected("the end of a value" if depth else "a value")
            if char == '"':
                self._skip_string()
            elif depth or char in "[{":
                depth = self._skip_structure(depth)
            else:
                self._next(_SCALAR)
            if not depth:
                return

    def _skip_structure(self, depth: int) -> int:
        """Skips characters outside of strings, up to the next string or to depth 0; returns the depth there."""
        segment = _OUTSIDE_STRINGS.match(self._text, self._at).group()  # type: ignore[union-attr]
        closed = segment.count("]") + segment.count("}")
        if depth > closed:
            self._at += len(segment)
            return depth + segment.count("[") + segment.count("{") - closed
        for bracket in _NESTING.finditer(segment):
            depth += 1 if bracket.group() in "[{" else -1
            if not depth:
                self._at += bracket.end()
                return 0
        self._at += len(segment)
        return depth

    def _skip_string(self) -> None:
        self._at += 1
        while True:
            self._at = _IN_STRING.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._text[self._at : self._at + 1] == '"':
                self._at += 1
                return
            if self._at + 2 <= len(self._text):  # a backslash and the escaped character
                self._at += 2
            elif not self._more():
                raise self._unexpected("the end of a string")

    def _skip_unusable(self, what: str) -> None:
        begun = self._begun
        self.skip()
        self._begun = begun
        raise UnusableError(what)

    def _next(self, skipped: re.Pattern[str]) -> str:
        while True:
            self._at = skipped.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _expect(self, char: str) -> None:
        if self.peek() != char:
            raise self._unexpected(f"{char!r}")
        self._at += 1

    def _more(self) -> bool:
        """Reads more bytes, and drops the consumed ones; returns whether there were any."""
        self._before = self.offset
        data = self._read()
        self._text = self._text[self._at :] + self._decoder.decode(data, final=not data)
        self._at = 0
        return bool(data)

    def _no_value(self, why: str) -> UnexpectedError:
        """The error for the last value, whether it does not end or is none."""
        error = self._unexpected("JSON", why)
        try:
            self.skip()
        except UnexpectedError:
            return cut_off(error.offset, "a value that does not end")
        return error

    def _unexpected(self, what: str, why: str = "") -> UnexpectedError:
        content = self._text[self._at : self._at + 20]
        if not content:
            return UnexpectedError(self.offset, f"the file is cut off: expected {what}")
        return UnexpectedError(self.offset, f"expected {what}, found {content!r}" + (f" ({why})" if why else ""))


def _size(text: str, end: int) -> int:
    """Bytes up to there."""
    return end if text.isascii() else len(text[:end].encode("utf-8", "surrogateescape"))
