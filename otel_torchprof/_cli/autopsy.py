"""``otel-torchprof autopsy``: which rank hung, and where, from the black boxes of all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._files.box_file import SUFFIX, is_of_the_living
from otel_torchprof._files.box_reading import read_box
from otel_torchprof._process.private_folder import default_folder
from otel_torchprof._process.threads import sleep
from otel_torchprof.errors import TorchProfError, printable

from .terminal import say, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from otel_torchprof._answers.autopsy import Autopsy, Mismatch, Transfer, Wait
    from otel_torchprof._files.flight_recorder import Dump
    from otel_torchprof._files.rank_state import RankState
    from otel_torchprof._native.blackbox import Collective

_MOST_LINES = 16
"""The most lines printed of one kind."""
_MOST_IN_LINE, _LONGEST_LINE = 4, 600
_NOTICED_WITHIN, _AGAIN = 1.5, 0.1
"""Seconds between the first and the last rank that notices a hang, and between two readings of the boxes."""


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "autopsy",
        help="report which rank hangs or died, and where, from the black boxes of all ranks",
        description="Reads the black boxes of all ranks of a run, dead or still running, and reports which ranks "
        "wait in which collective, for which ranks, and where these are. Exit status: 0 if every box was "
        "read, else 1.",
    )
    parser.add_argument(
        "paths",
        metavar="DIR",
        nargs="*",
        help=f"black boxes ({SUFFIX}) and flight recorder dumps, or folders of them (default: this user's folder of black boxes)",
    )
    parser.add_argument("--json", action="store_true", help="print the complete result as JSON")


def run(options: argparse.Namespace) -> int:
    """Prints which ranks hang and where; returns 1 if a box could not be read, else 0.

    Raises:
        TorchProfError: no box or dump could be read.
    """
    places = options.paths or [str(default_folder())]
    answer, notes, problems = compared(files_in(places), places)
    show(json.dumps(as_json(answer), indent=1) + "\n" if options.json else as_text(answer))
    for line in (*notes, *problems):
        say(line)
    return 1 if problems else 0


def compared(files: Sequence[Path], places: Sequence[str]) -> tuple[Autopsy, list[str], list[str]]:
    """Compares the ranks of boxes and dumps, which were found in places; returns also what was left out, and what could not be read.

    Raises:
        TorchProfError: no box or dump could be read.
    """
    from otel_torchprof._answers.autopsy import autopsy
    from otel_torchprof._files.flight_recorder import with_dumps
    from otel_torchprof._files.rank_state import of_one_run

    states, dumps, problems, paths = _read_all(files)
    if not states and not dumps:
        raise TorchProfError("; ".join(problems) or f"there is no {SUFFIX} in {', '.join(places)}")
    chosen, others = of_one_run(states)
    ranks, left_out = with_dumps(chosen, dumps)
    notes = []
    if others:
        named = _named([paths[id(state)] for state in others])
        notes.append(f"boxes of other runs, or of no rank, were left out: {named}")
    if left_out:
        notes.append(
            f"dumps of {ranks_text(left_out)} were left out: they are of an earlier run, or the rank has enqueued more since"
        )
    return autopsy(ranks), notes, problems


# ---- what the hang watch asks for: the program that it starts calls report_hang ----


def report_hang(box: str, seconds: float) -> None:
    """Writes to stdout, a file, ``hang: `` with one line for all ranks, then what the command prints; or ``no hang: `` and the reason.

    A hang is none while a rank that others wait for moves, is in something that may take longer, or is held by a debugger.

    Args:
        box: the box of the process that does nothing.
        seconds: for which it has done nothing.

    Raises:
        TorchProfError: its box cannot be read.
    """
    deadline = time.monotonic() + _NOTICED_WITHIN
    own, answer = _own_and_all(Path(box))
    while (running := _running(answer, seconds)) and time.monotonic() < deadline:
        sleep(_AGAIN)
        own, answer = _own_and_all(Path(box))
    if running:
        text = f"no hang: {_who(running)} may still run"
    else:
        text = f"hang: {in_a_line(own, answer)}; see {printable(os.readlink('/proc/self/fd/1'))}"  # noqa: PTH115 - of no path
    sys.stdout.write(f"{text}\n\n{as_text(answer)}")
    sys.stdout.flush()


def _own_and_all(box: Path) -> tuple[RankState, Autopsy]:
    """The state of the process of a box, and the comparison of the ranks of its run that have a box in the folder."""
    from otel_torchprof._answers.autopsy import autopsy
    from otel_torchprof._files.flight_recorder import with_dumps
    from otel_torchprof._files.rank_state import of_one_run

    states, dumps, problems, paths = _read_all(files_in([str(box.parent)]))
    own = next((state for state in states if paths[id(state)] == box), None)
    if own is None:
        raise TorchProfError("; ".join(problems) or f"there is no {box}")
    chosen, _ = of_one_run([state for state in states if state.run == own.run])
    return own, autopsy(with_dumps(chosen, dumps)[0])


def _running(answer: Autopsy, seconds: float) -> list[RankState]:
    """The ranks that others wait for, and that may come."""
    return [state for state in answer.ranks if state.rank in answer.culprits and _may_come(state, seconds)]


def _may_come(state: RankState, seconds: float) -> bool:
    from otel_torchprof._native.blackbox import LONG_SECONDS

    if not state.is_alive or state.is_closed or (state.is_hung and not state.is_held):
        return False
    limit = (
        max(seconds, LONG_SECONDS) if state.place else seconds
    )  # in something, its own watch knows how long that may take
    return state.is_held or state.last_ns - state.active_ns < limit * 1e9


def in_a_line(own: RankState, answer: Autopsy) -> str:
    """The causes, where the ranks are that others wait for, and who waits; without these, where the process itself is."""
    lines = [
        *map(_of_mismatch, answer.mismatches),
        *([_of_cycle(answer.cycle)] if answer.cycle else []),
        *_places_of(answer, is_brief=True),
        *map(_of_wait, answer.waits),
        *map(_of_transfer, answer.transfers),
    ]
    return printable("; ".join(lines[:_MOST_IN_LINE] or [_is_where([own], is_brief=True)]))[:_LONGEST_LINE]


def _read_all(files: Sequence[Path]) -> tuple[list[RankState], list[Dump], list[str], dict[int, Path]]:
    """Reads all files: states of the boxes, dumps of flight recorders, errors, and the path of each state by its ``id()``."""
    from otel_torchprof._files.flight_recorder import rank_of_file, read_dump
    from otel_torchprof._files.rank_state import state_of

    states: list[RankState] = []
    dumps: list[Dump] = []
    problems, paths = [], {}
    for number, path in enumerate(files):
        rank = rank_of_file(path)
        try:
            if rank is not None:
                dumps.append(read_dump(path, rank))
                continue
            contents, is_alive = read_box(str(path)), is_of_the_living(path)
        except (TorchProfError, OSError) as error:
            problems.append(str(error))
            continue
        states.append(state_of(contents, is_alive=is_alive, now_ns=time.time_ns(), number=-1 - number))
        paths[id(states[-1])] = path
    return states, dumps, problems, paths


def as_text(answer: Autopsy) -> str:
    """The text that is printed: the headlines, then a line per group of ranks in the same place."""
    return "\n".join(map(printable, (*_headlines(answer), "", *_roll_call(answer), "")))


def as_json(answer: Autopsy) -> dict[str, Any]:
    """The complete result as JSON values; times in Unix ns."""
    return {
        "waits": [_plain(wait) for wait in answer.waits],
        "transfers": [
            {"rank": transfer.rank, "peer": transfer.peer, "more": transfer.more, **transfer.call._asdict()}
            for transfer in answer.transfers
        ],
        "mismatches": [_plain(mismatch) for mismatch in answer.mismatches],
        "cycle": list(answer.cycle),
        "culprits": list(answer.culprits),
        "missing": list(answer.missing),
        "ambiguous": list(answer.ambiguous),
        "ranks": [
            {
                "rank": state.rank if state.rank >= 0 else None,
                "pid": state.pid,
                "host": state.host,
                "alive": state.is_alive,
                "closed": state.is_closed,
                "last": state.last_ns,
                "has_box": state.has_box,
                "place": state.place,
                "last_ended": state.last_ended,
                "since": state.since_ns,
                "killed": state.killed,
                "groups": [group._asdict() for group in state.groups.values()],
            }
            for state in answer.ranks
        ],
    }


def _plain(result: Wait | Mismatch) -> dict[str, Any]:
    return {**result._asdict(), "group": result.group.name}


def files_in(paths: Sequence[str]) -> list[Path]:
    """The files, and the boxes and dumps in the folders."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(filter(_is_of_a_rank, path.glob("**/*"))) if path.is_dir() else [path]
    return list({path.resolve(): path for path in files}.values())


def _is_of_a_rank(path: Path) -> bool:
    from otel_torchprof._files.flight_recorder import is_dump

    with contextlib.suppress(OSError):  # another user's, or removed meanwhile
        return (path.name.endswith(SUFFIX) and path.is_file()) or is_dump(path)
    return False


def _named(paths: Sequence[Path]) -> str:
    return ", ".join([*map(str, paths[:_MOST_LINES]), *(["..."] if len(paths) > _MOST_LINES else [])])


def _headlines(answer: Autopsy) -> Iterator[str]:
    if answer.ambiguous:
        yield f"several living processes say that they are {ranks_text(answer.ambiguous)}: name the boxes of one run"
    yield from map(_of_mismatch, answer.mismatches)
    if answer.cycle:
        yield _of_cycle(answer.cycle)
    yield from _few(_of_wait(wait) for wait in answer.waits)
    yield from _few(map(_of_transfer, answer.transfers))
    yield from _places_of(answer)
    if answer.missing:
        yield f"there is no box of {ranks_text(answer.missing)}"
    if not (answer.waits or answer.transfers or answer.mismatches):
        yield "no rank is known to wait for another"


def _few(lines: Iterable[str]) -> Iterator[str]:
    """The first :data:`_MOST_LINES` lines, and a line with the number of the rest."""
    every = list(lines)
    yield from every[:_MOST_LINES]
    if len(every) > _MOST_LINES:
        yield f"... and {len(every) - _MOST_LINES:,} more like that: see --json"


def _of_mismatch(mismatch: Mismatch) -> str:
    calls = "; ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in mismatch.calls)
    return f"{mismatch.kind}: collective #{mismatch.sequence_nr} of {mismatch.group.text}: {calls}"


def _of_cycle(cycle: Sequence[int]) -> str:
    ranks = [*cycle[1:_MOST_LINES], *((cycle[0],) if len(cycle) <= _MOST_LINES else ())]
    text = ", which waits for ".join(f"rank {rank}" for rank in ranks)
    more = "" if len(cycle) <= _MOST_LINES else f", and so on over {len(cycle):,} ranks"
    return f"cycle: rank {cycle[0]} waits for {text}{more}"


def _of_wait(wait: Wait) -> str:
    where = f"{wait.call} #{wait.sequence_nr} of {wait.group.text}"
    who, absent = ranks_text(wait.waiting), ranks_text(wait.absent) if wait.absent else ""
    since = f" since {_clock(wait.since_ns)}" if wait.since_ns else ""
    if wait.status == "pending":
        started = _started_text(wait)
        return f"{who} {_verb(wait.waiting, 'wait')} in {where}{since}{absent and f', for {absent}'}{started}"
    has_not = "has not" if len(wait.absent) == 1 else "have not"
    if wait.status == "failed":
        return f"{where} failed on {who}{absent and f'; {absent} {has_not} come to it'}"
    at = f" at {_clock(wait.since_ns)}" if wait.since_ns else ""
    return f"{absent} {has_not} come to {where}, which {who} enqueued{at}"


def _started_text(wait: Wait) -> str:
    """Names the ranks whose devices have not started the collective; empty without a flight recorder that says so."""
    behind = [rank for rank in wait.waiting if rank not in wait.started]
    if not wait.started or not behind:
        return ""
    return f"; it has started on {ranks_text(wait.started)} and not on {ranks_text(behind)}"


def _of_transfer(transfer: Transfer) -> str:
    more = f", and {transfer.more:,} more" if transfer.more else ""
    if transfer.call.has_failed:
        return f"{transfer_text(transfer)} failed on rank {transfer.rank}{more}"
    return f"rank {transfer.rank} waits in {transfer_text(transfer)}{more} since {_clock(transfer.call.enqueued_ns)}"


def _places_of(answer: Autopsy, *, is_brief: bool = False) -> Iterator[str]:
    """Lines on where ranks are: those that others wait for, and dead ones.

    If no process is alive, dead ranks are listed only where no wait is known: they would be all ranks.
    """
    shown = {rank for rank in answer.culprits if rank >= 0}
    is_post_mortem = not any(state.is_alive and not state.is_closed for state in answer.ranks)
    if not is_post_mortem or not (answer.waits or answer.transfers or answer.mismatches):
        shown |= {state.rank for state in answer.dead}
    together: dict[tuple[object, ...], list[RankState]] = {}
    for state in answer.ranks:
        if state.rank in shown:
            together.setdefault((state.has_box, state.is_alive, state.is_closed, place_text(state)), []).append(state)
    yield from _few(_is_where(states, is_brief=is_brief) for states in together.values())


def _is_where(states: Sequence[RankState], *, is_brief: bool) -> str:
    """A line on ranks in the same place; the brief one does not say what they did before."""
    first = states[0]
    is_one = len(states) == 1
    if not first.has_box:
        return f"{_who(states)} {'has' if is_one else 'have'} no black box; see what the flight recorder knows below"
    if first.is_alive and not first.is_closed:
        seconds = min((state.last_ns - state.since_ns) / 1e9 if state.since_ns else 0 for state in states)
        lasts = f" for {'' if is_one else 'at least '}{seconds:,.1f} s" if seconds else ""
        return f"{_who(states)} {'is' if is_one else 'are'} {place_text(first, lasts, is_brief=is_brief)}"
    seen = sorted(state.last_ns for state in states)
    when = _clock(seen[0]) if _clock(seen[0]) == _clock(seen[-1]) else f"{_clock(seen[0])} to {_clock(seen[-1])}"
    ended = (
        f"{'has' if is_one else 'have'} ended the box" if first.is_closed else f"{_verb(states, 'do')} not run any more"
    )
    killed = max(state.killed for state in states)
    memory = (
        f"; the kernel has killed {killed:,} process{'es' if killed > 1 else ''} of its cgroup for lack of memory"
        if killed
        else ""
    )
    return f"{_who(states)} {ended}{memory}; last seen at {when} {place_text(first, is_brief=is_brief)}"


def _roll_call(answer: Autopsy) -> Iterator[str]:
    """A line per group of ranks in the same place, the largest group first."""
    transfers = {transfer.rank: transfer for transfer in answer.transfers}
    together: dict[str, list[RankState]] = {}
    for state in answer.ranks:
        text = _doing(state, transfers.get(state.rank))
        ended = "box ended" if state.is_closed else "not running any more"
        together.setdefault(f"{ended}, last {text}" if state.is_closed or state.is_dead else text, []).append(state)
    for text, states in sorted(together.items(), key=lambda item: -len(item[1])):
        yield f"{_who(states)}: {text}"


def _doing(state: RankState, transfer: Transfer | None) -> str:
    from otel_torchprof._answers.autopsy import described

    pending = [(key, call) for key in state.calls if (call := state.pending(key)) is not None]
    if pending:
        key, first = min(pending, key=lambda item: item[1].enqueued_ns)
        return f"in {described(first)} #{first.sequence_nr} of {key.text}, {_progress(first)}"
    if transfer is not None and transfer.call.is_pending:
        return f"in {transfer_text(transfer)}, not complete"
    failed = [(key, call) for key in state.calls if (call := state.failed(key)) is not None]
    texts = [f"{described(call)} #{call.sequence_nr} of {key.text}" for key, call in failed]
    texts += [transfer_text(transfer)] if transfer is not None else []
    place = place_text(state) if state.has_box else "no black box, and nothing pending in its flight recorder"
    return "; ".join([place, *(f"{text} failed" for text in texts)])


def _progress(call: Collective) -> str:
    timeout = f" (timeout {call.timeout_ns / 1e9:,.0f} s)" if call.timeout_ns else ""
    if call.started_ns == 0:
        return f"not started{timeout}"
    return f"{'started, ' if call.started_ns > 0 else ''}not complete{timeout}"


def place_text(state: RankState, lasts: str = "", *, is_brief: bool = False) -> str:
    """``in forward > load_batch for 5.0 s; the last to end was backward``."""
    last = f"; the last to end was {state.last_ended}" if state.last_ended and not is_brief else ""
    return f"in {state.place or 'no recorded event'}{lasts}{last}"


def transfer_text(transfer: Transfer) -> str:
    """``recv from rank 1 (tag 0) of the default group``."""
    from otel_torchprof._answers.autopsy import spelled
    from otel_torchprof._files.rank_state import GroupKey

    call = transfer.call
    name, preposition = ("send", "to") if spelled(call) == "send" else ("recv", "from")
    peer = "any rank" if transfer.peer < 0 else f"rank {transfer.peer}"
    tag = f" (tag {call.tag})" if call.tag >= 0 else ""
    return f"{name} {preposition} {peer}{tag} of {GroupKey(call.group, call.ranks).text}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0, 2-7``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]  # noqa: PLR2004 - two are no range
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(texts)}"


def _who(states: Sequence[RankState]) -> str:
    """Names the ranks, and by their pids the processes of unknown rank."""
    ranks = [state.rank for state in states if state.rank >= 0]
    processes = [f"process {state.pid}" for state in states if state.rank < 0]
    return ", ".join(
        [
            *([ranks_text(ranks)] if ranks else []),
            *processes[:_MOST_LINES],
            *(["..."] if len(processes) > _MOST_LINES else []),
        ]
    )


def _verb(subjects: Sequence[object], plural: str) -> str:
    return plural if len(subjects) != 1 else {"do": "does"}.get(plural, f"{plural}s")


def _clock(unix_ns: int) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(unix_ns / 1e9))}.{unix_ns % 10**9 // 10**8}"
