"""Programs of every kind of call, put together at random from a few parts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

Program = tuple[str, list["Program"]]
"""What is called, and the programs that it calls in turn."""


class _Failure(Exception):  # noqa: N818 - raised by programs on purpose
    pass


class _Made:
    """Calls from within its making and its methods."""

    def __init__(self, inside: list[Program]) -> None:
        run_all(inside)

    def __enter__(self) -> None:
        len("entered")

    def __exit__(self, *_error: object) -> None:
        len("left")

    @property
    def value(self) -> int:
        return len("value")

    def __lt__(self, other: object) -> bool:
        return bool("less")


def run_all(programs: list[Program]) -> None:
    """Runs programs one after the other."""
    for what, inside in programs:
        _PARTS[what](inside)


def _plain(inside: list[Program]) -> None:
    run_all(inside)


def _recursive(inside: list[Program], depth: int = 3) -> None:
    if depth:
        _recursive(inside, depth - 1)
    else:
        run_all(inside)


def _functions(inside: list[Program]) -> None:
    """C functions: bound and unbound, with a wrong argument, with keywords, of a class, and types, which are none."""
    values: list[Any] = []
    values.append(1)
    list.append(values, 2)
    append = values.append
    append(3)
    len(*[values])
    dict.fromkeys(values)
    "".join(map(str, values))
    sorted(values, key=abs, reverse=True)
    int("3")
    with contextlib.suppress(TypeError):
        "".join(3)  # type: ignore[arg-type]
    with contextlib.suppress(ValueError):
        values.index(7)
    run_all(inside)


def _calls_back(inside: list[Program]) -> None:
    sorted([1, 2], key=lambda value: run_all(inside) or value)


def _made(inside: list[Program]) -> None:
    with _Made(inside) as _:
        made = _Made([])
        getattr(made, "value")  # noqa: B009 - a C function that calls Python
    sorted([made, made])


def _fails(inside: list[Program]) -> None:
    def raises(depth: int) -> None:
        if not depth:
            raise _Failure
        try:
            raises(depth - 1)
        finally:
            run_all(inside)

    with contextlib.suppress(_Failure):
        raises(2)


def _fails_in_function(inside: list[Program]) -> None:
    def raises(_value: int) -> int:
        run_all(inside)
        raise _Failure

    with contextlib.suppress(_Failure):
        max([1, 2], key=raises)


def _generator(inside: list[Program]) -> Generator[int, Any, None]:
    yield 1
    try:
        yield 2
    except _Failure:
        run_all(inside)
        yield 3
    run_all(inside)


def _delegating(inside: list[Program]) -> Generator[int, Any, None]:
    yield from _generator(inside)


def _iterated(inside: list[Program]) -> None:
    for _ in _generator(inside):
        run_all(inside)
    list(value for value in _delegating(inside))  # noqa: C400 - a generator of its own


def _thrown_into(inside: list[Program]) -> None:
    for make in (_generator, _delegating):
        running = make(inside)
        next(running)
        next(running)
        running.throw(_Failure())
        with contextlib.suppress(_Failure):
            running.throw(_Failure())
        with contextlib.suppress(_Failure):
            make(inside).throw(_Failure())


def _given_up(inside: list[Program]) -> None:
    running, other = _generator(inside), _delegating(inside)
    next(running)
    next(other)
    next(running)
    other.close()
    _generator(inside).close()
    del running


async def _awaited(inside: list[Program]) -> int:
    run_all(inside)
    return len("x")


async def _several() -> Any:
    yield len("y")
    yield 2


async def _coroutine(inside: list[Program]) -> None:
    await _awaited(inside)
    async for _ in _several():
        await _awaited([])


def _driven(inside: list[Program]) -> None:
    with contextlib.suppress(StopIteration):
        _coroutine(inside).send(None)


def _executed(inside: list[Program]) -> None:
    exec("class Made:\n  size = len('x')\nrun_all(inside)", {"run_all": run_all, "inside": inside})  # noqa: S102


_PARTS: dict[str, Callable[[list[Program]], None]] = {
    "plain": _plain,
    "recursive": _recursive,
    "functions": _functions,
    "calls back": _calls_back,
    "made": _made,
    "fails": _fails,
    "fails in function": _fails_in_function,
    "iterated": _iterated,
    "thrown into": _thrown_into,
    "given up": _given_up,
    "driven": _driven,
    "executed": _executed,
}

EVERYTHING: list[Program] = [(what, [(other, []) for other in _PARTS]) for what in _PARTS]
"""Each part around each other."""


def programs() -> st.SearchStrategy[list[Program]]:
    """Programs of up to a dozen parts."""
    empty: st.SearchStrategy[list[Program]] = st.just([])
    return st.recursive(empty, lambda inside: st.lists(st.tuples(st.sampled_from(list(_PARTS)), inside)), max_leaves=12)
