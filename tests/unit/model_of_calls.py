"""Acts out a program of random_calls.py, to know what calls there are in it.

The model's generators are generators too, so that what a generator does when it is sent to, thrown at or closed is not said
twice.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from dataclasses import dataclass
from types import GeneratorType
from typing import TYPE_CHECKING

from random_calls import COROUTINE, GENERATOR, LINE, Action, Program, Written

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

MOST_CALLS = 1500
"""Of a program with more no model is made."""


@dataclass
class Call:
    """A call as it should be recorded."""

    depth: int
    name: str
    """Of Python functions from the line on."""
    identity: int = 0
    """Of a generator or coroutine: which one, from 1."""
    error: str | None = None
    """The class of the exception that left it."""


class _StopError(Exception):
    """Stands for StopIteration, which the model's own generators do not let through."""


class _ExitError(BaseException):
    """Stands for GeneratorExit, with which the generators of the model that delegate to each other would be closed one by one.

    The outer ones would not know then that an inner one has caught what became of it: an error in a `finally`.
    """


_NAMES = {_StopError: "StopIteration", _ExitError: "GeneratorExit"}


def _throw(body: Generator[None, None, bool], error: BaseException) -> None:
    if body.gi_running:  # up to Python 3.11 the interpreter crashes where a generator that delegates throws into itself
        raise ValueError("generator already executing")
    body.throw(error)


def _close(body: Generator[None, None, bool]) -> None:
    """As ``close()`` does it."""
    if body.gi_frame is None:
        return
    try:
        _throw(body, _ExitError())
    except (_ExitError, StopIteration):
        return
    raise RuntimeError("generator ignored GeneratorExit")


_METHODS: dict[str, Callable[..., object]] = {"send": GeneratorType.send, "throw": _throw, "close": _close}


@dataclass(eq=False)
class _Running:
    """A generator or coroutine in a slot."""

    sort: int
    body: Generator[None, None, bool]


class Model:
    """Acts a program out: :attr:`calls` are those inside the first function."""

    def __init__(self, program: Program) -> None:
        self.calls: list[Call] = []
        self._program = program
        self._open: list[Call] = []
        self._identities = 0
        self._slots: list[_Running | None] = [None] * 4
        self._started: set[int | None] = set()
        self.too_many = False
        self.is_untold = False
        """Whether the interpreter does not tell of a call: Python 3.11 tells of no resumption of what delegates, where what it
        delegates to has ended because of an exception that was thrown into it."""
        for _ in self._body(program.functions[0].body, None):
            pass

    def _enter(self, name: str, identity: int = 0) -> None:
        call = Call(len(self._open) + 1, name, identity)
        self._open.append(call)
        if len(self.calls) < MOST_CALLS:
            self.calls.append(call)
        else:
            self.too_many = True

    def _leave(self, error: BaseException | None = None) -> None:
        call = self._open.pop()
        if error is not None:
            call.error = _NAMES.get(type(error), type(error).__name__)

    @contextlib.contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        self._enter(name)
        try:
            yield
        except BaseException as error:
            self._leave(error)
            raise
        self._leave()

    def _call(self, number: int) -> None:
        written = self._program.functions[number]
        with self._inside(f"({written.line}): f{number}"):
            for _ in self._body(written.body, None):
                pass

    def _generator(self, number: int, slot: int | None = None) -> Generator[None, None, bool]:
        """One that runs, from its first segment on; -1 is `pause`."""
        self._identities += 1
        me = _Me(f"f{number}" if number >= 0 else "pause", self._identities)
        written = self._program.functions[number] if number >= 0 else _PAUSE
        self._enter(me.at(written.line), me.identity)
        self._started.add(slot)
        try:
            yield from self._body(written.body, me)
        except _StopError:  # made another error while it is still in there, since Python 3.12
            self._leave(RuntimeError())
            raise RuntimeError from None
        except BaseException as error:
            self._leave(error)
            raise
        self._leave()
        return True

    def _body(self, actions: list[Action], me: _Me | None) -> Generator[None, None, bool]:
        """True where it ends with a return."""
        for action in actions:
            if self.too_many:
                return True
            if (yield from getattr(self, f"_do_{action.what}")(action, me)):
                return True
        return False

    def _do_c(self, _action: Action, _me: _Me | None) -> Generator[None, None, bool]:
        yield from ()
        with self._inside("<built-in function len>"):
            return False

    def _do_c_error(self, _action: Action, _me: _Me | None) -> Generator[None, None, bool]:
        yield from ()
        with self._inside("<built-in method index of list object>"):
            raise ValueError

    def _do_raise(self, _action: Action, _me: _Me | None) -> Generator[None, None, bool]:
        yield from ()
        raise ValueError

    def _do_return(self, _action: Action, _me: _Me | None) -> Generator[None, None, bool]:
        yield from ()
        return True

    def _do_call(self, action: Action, _me: _Me | None) -> Generator[None, None, bool]:
        yield from ()
        self._call(action.target)
        return False

    def _do_keyed(self, action: Action, _me: _Me | None) -> Generator[None, None, bool]:
        yield from ()
        with self._inside("<built-in function sorted>"):
            self._call(action.target)
            self._call(action.target)
        return False

    def _do_yield(self, action: Action, me: _Me) -> Generator[None, None, bool]:
        self._leave()
        try:
            yield
        finally:
            self._enter(me.at(action.line), me.identity)
        return False

    def _do_delegate(self, action: Action, me: _Me) -> Generator[None, None, bool]:
        """What is sent goes through this one; what is thrown goes to the innermost, and here when that one has ended."""
        inner, thrown, running = self._generator(action.target), None, True
        while True:
            try:
                inner.send(None) if thrown is None else inner.throw(thrown)
            except BaseException as ended:
                if not running:
                    self._enter(me.at(action.line), me.identity)
                if isinstance(ended, StopIteration):
                    self.is_untold |= not running and sys.version_info[:2] == (3, 11)
                    return False
                raise
            if running:
                self._leave()
            try:
                yield
            except _ExitError:
                try:
                    _close(inner)
                finally:
                    self._enter(me.at(action.line), me.identity)
                raise
            except Exception as error:  # noqa: BLE001 - whatever is thrown
                thrown, running = error, False
            else:
                thrown, running = None, True
                self._enter(me.at(action.line), me.identity)

    def _do_make(self, action: Action, _me: _Me | None) -> Generator[None, None, bool]:
        yield from ()
        if self._slots[action.target] is None:
            number = action.body[0].target
            body = self._generator(number, action.target)
            self._slots[action.target] = _Running(self._program.functions[number].sort, body)
        return False

    def _resumed(self, action: Action, method: str, *arguments: object) -> None:
        slot = self._slots[action.target]
        if slot is None:
            return
        kind = "coroutine" if slot.sort == COROUTINE else "generator"
        with self._inside(
            "<built-in function next>" if action.what == "next" else f"<built-in method {method} of {kind} object>"
        ):
            if slot.sort == COROUTINE and slot.body.gi_frame is None and method != "close":
                raise RuntimeError
            try:
                _METHODS[method](slot.body, *arguments)
            except StopIteration:
                if action.what != "next":
                    raise _StopError from None

    def _do_next(self, action: Action, _me: _Me | None) -> Generator[None, None, bool]:
        yield from ()
        self._resumed(action, "send", None)
        return False

    _do_send = _do_next

    def _do_throw(self, action: Action, _me: _Me | None) -> Generator[None, None, bool]:
        yield from ()
        if action.target in self._started:
            self._resumed(action, "throw", ValueError())
        return False

    def _do_close(self, action: Action, _me: _Me | None) -> Generator[None, None, bool]:
        yield from ()
        if action.target in self._started:
            self._resumed(action, "close")
        return False

    def _do_try(self, action: Action, me: _Me | None) -> Generator[None, None, bool]:
        try:
            return (yield from self._body(action.body, me))
        except Exception:  # noqa: BLE001 - as the program does
            return (yield from self._body(action.other, me))

    def _do_finally(self, action: Action, me: _Me | None) -> Generator[None, None, bool]:
        try:
            returned = yield from self._body(action.body, me)
        except BaseException:
            if (yield from self._body(action.other, me)):  # a return there takes the place of what was raised
                return True
            raise
        return (yield from self._body(action.other, me)) or returned

    def _do_with(self, action: Action, me: _Me | None) -> Generator[None, None, bool]:
        for name in ("__init__", "__enter__"):
            self._enter(f"({LINE[name]}): {name}")
            self._leave()
        returned = False
        try:
            returned = yield from self._body(action.body, me)
        except BaseException as error:
            self._exit()
            if not action.target or isinstance(error, _ExitError):
                raise
        else:
            self._exit()
        return returned

    def _exit(self) -> None:
        self._enter(f"({LINE['__exit__']}): __exit__")
        self._leave()

    def _do_loop(self, action: Action, me: _Me | None) -> Generator[None, None, bool]:
        """What is not at its end when the loop is left is closed there; whatever it raises then is lost."""
        inner = self._generator(action.target)
        try:
            for _ in inner:
                if (yield from self._body(action.body, me)):
                    return True
        finally:
            with contextlib.suppress(Exception):
                _close(inner)
        return False


@dataclass(frozen=True)
class _Me:
    """The generator or coroutine whose body is acted out."""

    name: str
    identity: int

    def at(self, line: int) -> str:
        return f"({line}): {self.name}"


_PAUSE = Written(
    GENERATOR,
    LINE["pause"],
    [Action("finally", 0, 0, [Action("yield", LINE["yield"])], [Action("c", 0)])],
)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Without what pytest and the collector would call in between. What is called here in pytest's stead is no call of Python's."""
    hook, sys.unraisablehook = sys.unraisablehook, id
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        sys.unraisablehook = hook
