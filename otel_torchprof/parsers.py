"""Parsers and checks of options: each converts text, or checks a value, and raises an error with the allowed values.

:func:`nearest` suggests the right name for an unknown option.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

if TYPE_CHECKING:
    from collections.abc import Callable

_Number = TypeVar("_Number", int, float)
ExportRanks = Literal["all", "node", "one"]
RANK_CHOICES: tuple[str, ...] = get_args(ExportRanks)
_MOST_MISTAKES = 2
_LEAST_BOX, _LARGEST_BOX = 1 << 20, 1 << 30
_CODE_NAMES = "module names (torch.nn), and paths or globs, which have a / or a * (src/model.py, */site-packages/*)"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def nearest(word: str, words: Iterable[str]) -> str:
    """Returns the item of ``words`` that ``word`` most likely misspells; empty if none is near.

    Near means a third of its letters or fewer, two at most, that are wrong, missing, superfluous or transposed.
    """
    allowed = min(_MOST_MISTAKES, len(word) // 3)
    same_length = (other for other in words if abs(len(other) - len(word)) <= allowed)
    mistakes, candidate = min(((_mistakes(word, other), other) for other in same_length), default=(allowed + 1, ""))
    return candidate if mistakes <= allowed else ""


def suggestion(word: str, words: Iterable[str]) -> str:
    """Returns the question for a misspelt word, ``did you mean detail?``; empty if no word is near."""
    candidate = nearest(word, words)
    return f"did you mean {candidate}?" if candidate else ""


def _mistakes(word: str, other: str) -> int:
    """Counts letters to change, omit, add or transpose until the words are equal (optimal string alignment)."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for row, letter in enumerate(word, 1):
        current = [row]
        for at, target in enumerate(other, 1):
            least = min(last[at] + 1, current[-1] + 1, last[at - 1] + (letter != target))
            if row > 1 and at > 1 and letter == other[at - 2] and word[row - 2] == target:
                least = min(least, before[at - 2] + 1)
            current.append(least)
        before, last = last, current
    return last[-1]


def one_of(*words: str) -> Callable[[object], Any]:
    """Returns a check that accepts one of the words, in any case, and raises ValueError for others."""

    def check(value: object) -> str:
        text = value.strip().lower() if isinstance(value, str) else ""
        if text not in words:
            raise ValueError(f"it must be one of {', '.join(map(repr, words))}")
        return text

    return check


def switch(text: str) -> bool:
    """Parses yes or no.

    Raises:
        ValueError: it is neither.
    """
    value = text.lower()
    if value in {"true", "1", "yes", "on"}:
        return True
    if value in {"false", "0", "no", "off"}:
        return False
    raise ValueError("allowed are true and false")


def number(allowed: str, fits: Callable[[Any], bool], *kinds: type[int | float]) -> Callable[[object], Any]:
    """Returns a check of a number, of one of the kinds if there are any.

    It raises TypeError for what is none, and ValueError for a number that is not finite or does not fit.
    """

    def check(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, kinds or (int, float)):
            raise TypeError(f"it must be {allowed}")
        if not (-math.inf < value < math.inf and fits(value)):
            raise ValueError(f"it must be {allowed}")
        return value

    return check


def whole(allowed: str, least: int, most: float = math.inf) -> Callable[[object], Any]:
    """Returns a check of a whole number."""
    return number(allowed, lambda value: least <= value <= most, int)


def or_none(check: Callable[[object], Any]) -> Callable[[object], Any]:
    """Returns a check that accepts None too."""
    return lambda value: None if value is None else check(value)


def number_or_text(text: str) -> float | str:
    """Parses a number; any other text stays as it is, for the check to refuse."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def number_or_switch(text: str) -> float | str | bool:
    """Parses a number, or yes or no; any other text stays as it is, for the check to refuse. A number of 0 or 1 is one."""
    value = number_or_text(text)
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        return switch(value)
    return value


def sampling_rate(value: object) -> float:
    """Checks samples a second; True is 100, False 0.

    Raises:
        TypeError, ValueError: it is neither a number nor True or False, or out of range.
    """
    if isinstance(value, bool):
        return 100.0 if value else 0.0
    return float(_RATE(value))


def boolean(allowed: str) -> Callable[[object], bool]:
    """Returns a check that raises TypeError for a value that is neither True nor False."""

    def check(value: object) -> bool:
        if not isinstance(value, bool):
            raise TypeError(f"it must be {allowed}")
        return value

    return check


_MOST_RATE = 1000
_RATE = number("True, False, or a number of samples a second from 0 to 1000", lambda rate: 0 <= rate <= _MOST_RATE)


def items(text: str) -> list[str]:
    """Splits text at commas."""
    return [item for part in text.split(",") if (item := part.strip())]


def code_names(given: object) -> tuple[str, ...]:
    """Checks a list of module names, paths and globs.

    Raises:
        TypeError, ValueError: it is no list, or an entry is none of them.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"it must be a list of {_CODE_NAMES}")
    entries = tuple(given)
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(f"{entry!r} is no str; it must be a list of {_CODE_NAMES}")
        if not (is_path(entry) or all(part.isidentifier() for part in entry.split("."))) or not entry.strip("/. "):
            raise ValueError(f"{entry!r} is none of what is allowed: {_CODE_NAMES}")
    return entries


def is_path(entry: str) -> bool:
    """Whether an entry of a list of code is a path or a glob."""
    return "/" in entry or "*" in entry or entry.endswith(".py")


def byte_size(value: object) -> int:
    """Parses a number of bytes; a str may end in K, M or G.

    Raises:
        ValueError: it is not a number above 0.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    text = value.strip() if isinstance(value, str) else ""
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if number.isdecimal() and unit in _UNITS and int(number) > 0:
        return int(number) * _UNITS[unit]
    raise ValueError("allowed is a whole number of bytes, or one with K, M or G, above 0")


def share(value: object) -> float:
    """Parses a share of the time.

    Raises:
        ValueError: it is not a share.
    """
    return _number(value, float, lambda fraction: 0 < fraction <= 1, "a number above 0, up to 1")


def seconds(value: object) -> float:
    """Parses a time in seconds.

    Raises:
        ValueError: it is not a time.
    """
    return _number(value, float, lambda time: 0 <= time < math.inf, "a number of seconds, 0 or above")


def type_of_device(value: object) -> str:
    """Checks a type of device, as ``torch.device`` names it.

    Raises:
        TypeError, ValueError: it cannot be such a name.
    """
    if not isinstance(value, str):
        raise TypeError("it must be the name of a type of device, such as 'cuda', or None")
    if not value.isidentifier():
        raise ValueError("allowed is the name of a type of device, such as cuda, without an index")
    return value


def whole_number(value: object) -> int:
    """Parses a count.

    Raises:
        ValueError: it is not a count.
    """
    whole = None if isinstance(value, float) else value
    return _number(whole, int, lambda count: count >= 1, "a whole number above 0")


def _number(value: Any, kind: type[_Number], allows: Callable[[_Number], bool], allowed: str) -> _Number:
    try:
        converted = None if isinstance(value, bool) else kind(value)
    except (TypeError, ValueError):
        converted = None
    if converted is None or not allows(converted):
        raise ValueError(f"allowed is {allowed}")
    return converted


def share_of_ranks(value: object) -> str | float:
    """Parses the ranks that record and export: one of :data:`RANK_CHOICES`, or a share of them.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str) and value.strip().lower() in RANK_CHOICES:
        return value.strip().lower()
    try:
        fraction = share(value)
    except ValueError:
        raise ValueError(f"allowed are {', '.join(RANK_CHOICES)}, and a share above 0, up to 1") from None
    return "all" if fraction == 1 else fraction


class BlackBoxOptions(NamedTuple):
    """Detail, place and size of a black box."""

    detail: Literal["steps", "ops"]
    directory: str = ""
    """Empty: a folder of the user's under the shared memory file system."""
    size: int | None = None
    """Size in bytes; None: 16 MiB, or less if less memory is available."""
    hang: float | None = None
    """Seconds without an event after which a thread of the loop counts as hanging; None: hangs are not detected."""
    exits: bool = False
    """Whether the process ends when it hangs."""


def black_box(value: object) -> BlackBoxOptions:
    """Parses the detail, then in any order a folder, a size, and the time of a hang, with ``exit`` if that ends the process.

    ``ops,/scratch/boxes,32M,hang=60,exit``.

    Raises:
        ValueError: it has another form.
    """
    if isinstance(value, BlackBoxOptions):
        return value
    detail, *others = [part.strip() for part in value.split(",")] if isinstance(value, str) else [""]
    options = BlackBoxOptions("ops" if detail.lower() == "ops" else "steps")
    allowed = "allowed is steps or ops, and after commas a folder with a slash in it, a size such as 32M, hang=60, exit"
    if detail.lower() not in {"steps", "ops"}:
        raise ValueError(allowed)
    exits = "exit" in map(str.lower, others)
    for part in filter(lambda part: part.lower() != "exit", others):
        if "/" in part and not options.directory:
            options = options._replace(directory=part)
            continue
        if part.lower().startswith("hang=") and options.hang is None:
            options = options._replace(
                hang=_number(part[5:], float, lambda n: 0 < n < math.inf, "hang= with seconds above 0")
            )
            continue
        try:
            size = byte_size(part)
        except ValueError:
            raise ValueError(allowed) from None
        if options.size is not None:
            raise ValueError(allowed)
        if not _LEAST_BOX <= size <= _LARGEST_BOX:
            raise ValueError("allowed is a size from 1M to 1G")
        options = options._replace(size=size)
    if exits and options.hang is None:
        raise ValueError("allowed is exit with hang=, as in hang=60,exit")
    return options._replace(exits=exits)


def control_folder(text: str) -> str | None:
    """Parses the folder of control sockets: empty for the default one, None for no socket.

    Raises:
        ValueError: it is neither a folder with a slash in it, nor yes or no.
    """
    if "/" in text:
        return text
    try:
        return "" if not text or switch(text) else None
    except ValueError:
        raise ValueError("allowed are on, off, and a folder with a slash in it") from None


def names(text: str) -> frozenset[str]:
    """Parses names, separated by commas."""
    return frozenset(name.strip() for name in text.split(","))


def steps(text: str) -> int:
    """Parses a number of steps.

    Raises:
        ValueError: it is not such a number.
    """
    if not text.isdecimal():
        raise ValueError("allowed is a whole number of steps")
    return int(text)
