"""``otel-torchprof top``: what running processes do now."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof.errors import TorchProfError

from .attach import NO_SOCKET, check_exists
from .control_client import process_of
from .screen import screen
from .terminal import show
from .top_page import SORTS, PageState, page
from .top_sources import Sources

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from otel_torchprof._answers.running import ProcessView

    from .screen import Screen

_EVERY_SECOND = 1.0
_REST = 10
"""Pause between two pages, as a multiple of the CPU time that one takes: many processes are displayed less often."""
_NO_LIMIT = 10_000
"""Columns without a terminal: nothing is cut."""
_ENTER, _ESCAPE, _ERASE = "\r\n", "\x1b", "\x7f\b"


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "top",
        help="display what running processes do now: steps, phases, operators, late ranks",
        description="Displays a row per instrumented process of this user, each second: its step and steps per second, phases, time in "
        "collectives, memory, what is open now and for how long, and the slowest operators. Reads the black boxes of the processes, which "
        "costs them nothing; a process without one is asked over its control socket, and has no operators. Keys: q quits, s sorts, / filters. "
        "Without a terminal, prints once.",
    )
    parser.add_argument(
        "what",
        metavar="PID|DIR",
        nargs="*",
        help="processes, or folders of black boxes",
    )
    parser.add_argument("--all", action="store_true", help="all processes of this user (the default)")
    parser.add_argument("--once", action="store_true", help="print one page, and end")
    parser.add_argument("--json", action="store_true", help="print the page as JSON, once")
    parser.add_argument(
        "--sort", choices=list(SORTS), default=next(iter(SORTS)), help="order of the rows (default: rank)"
    )


def run(options: argparse.Namespace) -> int:
    """Displays the page until ``q``; returns 0, or 1 if it is printed once and there is no process.

    Raises:
        TorchProfError: an argument is neither a process id nor a path.
    """
    sources = Sources(*_places(options.what))
    state = PageState(options.sort)
    if options.once or options.json:
        return _print_once(sources, state, as_json=options.json)
    with screen() as terminal:
        if terminal is None:
            return _print_once(sources, state, as_json=False)
        if sources.statuses is not None:
            sources.statuses.start()
        try:
            _display(terminal, sources, state)
        except EOFError:  # the terminal was closed
            return 1
        finally:
            if sources.statuses is not None:
                sources.statuses.stop()
    return 0


def _places(words: Sequence[str]) -> tuple[list[Path], list[int]]:
    folders, pids = [], []
    for word in words:
        if word.isdecimal():
            pids.append(int(word))
        elif Path(word).exists():
            folders.append(Path(word))
        else:
            raise TorchProfError(f"{word!r} is neither a process id nor a folder of black boxes")
    return folders, pids


def _print_once(sources: Sources, state: PageState, *, as_json: bool) -> int:
    views, notes = look_once(sources)
    if as_json:
        show(json.dumps([plain(view) for view in views], indent=1) + "\n")
    else:
        columns = shutil.get_terminal_size((_NO_LIMIT, 0)).columns
        show("\n".join([*page(views, state, columns=columns, notes=notes), ""]))
    return 0 if views else 1


def look_once(sources: Sources) -> tuple[list[ProcessView], list[str]]:
    """What the processes do now, and notes on those that cannot be seen; takes at most two seconds."""
    if sources.statuses is not None:
        sources.statuses.poll()
        sources.look(time.time_ns())  # which processes have boxes: their answers give the numbers of their steps
    views = sources.look(time.time_ns())
    return views, _notes(sources, views)


def _display(terminal: Screen, sources: Sources, state: PageState, clock: Callable[[], float] = time.monotonic) -> None:
    due, views = clock(), []
    while True:
        before, is_due = time.thread_time(), clock() >= due
        if is_due:
            views = sources.look(time.time_ns())
        columns, lines = terminal.size
        notes = _notes(sources, views)
        terminal.draw(page(views, state, columns=columns, lines=lines, has_keys=True, notes=notes))
        if is_due:
            due = clock() + max(_EVERY_SECOND, _REST * (time.thread_time() - before))
        for key in terminal.keys(due - clock()):
            if key in "qQ" and not state.is_typing:
                return
            state = after_key(state, key)


def after_key(state: PageState, key: str) -> PageState:
    """The state after a key."""
    if state.is_typing:
        if key in _ENTER or key == _ESCAPE:
            return state._replace(is_typing=False, filter="" if key == _ESCAPE else state.filter)
        text = state.filter[:-1] if key in _ERASE else state.filter + key * key.isprintable()
        return state._replace(filter=text)
    if key == "/":
        return state._replace(is_typing=True, filter="")
    if key == _ESCAPE:
        return state._replace(filter="")
    orders = list(SORTS)
    return state._replace(sort=orders[(orders.index(state.sort) + 1) % len(orders)]) if key in "sS" else state


def _notes(sources: Sources, views: Sequence[ProcessView]) -> list[str]:
    notes = [f"{path.name}: {problem}" for path, problem in sources.boxes.problems.items()]
    notes += map(_why_not_displayed, set(sources.pids) - {view.pid for view in views})
    if not views and not sources.pids:
        notes.append(
            "no instrumented process of this user runs: set OTEL_TORCHPROF_BLACKBOX=steps (or ops) for a job, or name its folder of boxes"
        )
    return notes


def _why_not_displayed(pid: int) -> str:
    try:
        check_exists(pid)
        return f"process {pid} does not answer" if process_of(pid) else f"process {pid} {NO_SOCKET}"
    except TorchProfError as error:
        return str(error)


def plain(view: ProcessView) -> dict[str, Any]:
    """A process as JSON values; times in Unix ns."""
    return {
        **view._asdict(),
        "run": view.run._asdict(),
        "operators": [each._asdict() for each in view.operators],
        "threads": [
            {**thread._asdict(), "calls": [{**call._asdict(), "kind": call.kind.name.lower()} for call in thread.calls]}
            for thread in view.threads
        ],
    }
