"""``otel-torchprof autopsy``: which rank hung, and where, from the black boxes of all ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_torchprof._record.box_file import SUFFIX, default_folder, is_of_the_living
from otel_torchprof.errors import TorchProfError

from .recover import read
from .terminal import say, show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from otel_torchprof._record.autopsy import Autopsy, Mismatch, RankState, Wait


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "autopsy",
        help="say which rank hung or died, and where, from the black boxes of all ranks",
        description="Reads the black boxes of the ranks of a run, of those that have died and of those that still run, and says which "
        "ranks wait in which collective, for whom, and where those are. Exit status: 0 when every box was read, else 1.",
    )
    parser.add_argument(
        "paths",
        metavar="DIR",
        nargs="*",
        help=f"folders with boxes ({SUFFIX}), or boxes (default: where those of this user lie)",
    )
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")


def run(options: argparse.Namespace) -> int:
    """Prints it; returns 1 where a box could not be read.

    Raises:
        TorchProfError: there is none that can be read.
    """
    from otel_torchprof._record.autopsy import autopsy, state_of

    files = _files(options.paths or [str(default_folder())])
    states, problems = [], []
    for number, path in enumerate(files):
        try:
            contents = read(str(path))
            states.append(
                state_of(contents, is_alive=is_of_the_living(path), now_ns=time.time_ns(), number=-1 - number)
            )
        except (TorchProfError, OSError) as error:
            problems.append(str(error))
    if not states:
        raise TorchProfError(
            "; ".join(problems) or f"there is no {SUFFIX} in {', '.join(options.paths) or default_folder()}"
        )
    found = autopsy(states)
    show(json.dumps(as_json(found), indent=1) + "\n" if options.json else as_text(found))
    for problem in problems:
        say(problem)
    return 1 if problems else 0


def as_text(found: Autopsy) -> str:
    """What happened first, then who is where."""
    return "\n".join((*_headlines(found), "", *_roll_call(found), ""))


def as_json(found: Autopsy) -> dict[str, Any]:
    """All that is known, with ranks as numbers and times as Unix ns."""
    return {
        "waits": [_plain(wait) for wait in found.waits],
        "mismatches": [_plain(each) for each in found.mismatches],
        "cycle": list(found.cycle),
        "culprits": list(found.culprits),
        "missing": list(found.missing),
        "ranks": [
            {
                "rank": state.rank,
                "pid": state.pid,
                "host": state.host,
                "alive": state.is_alive,
                "last": state.last_ns,
                "place": state.place,
                "groups": [group._asdict() for group in state.groups.values()],
            }
            for state in found.ranks
        ],
    }


def _plain(each: Wait | Mismatch) -> dict[str, Any]:
    return {**each._asdict(), "group": each.group.name}


def _files(paths: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        found += sorted(path.glob(f"**/*{SUFFIX}")) if path.is_dir() else [path]
    return found


def _headlines(found: Autopsy) -> Iterator[str]:
    from otel_torchprof._record.autopsy import ranks_text, spelled

    by_rank = {state.rank: state for state in found.ranks}
    for mismatch in found.mismatches:
        calls = "; ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in mismatch.calls)
        yield f"{mismatch.kind}: collective #{mismatch.sequence_nr} of {mismatch.group.text}: {calls}"
    if found.cycle:
        yield f"cycle: {' waits for '.join(f'rank {rank}' for rank in (*found.cycle, found.cycle[0]))}"
    for wait in found.waits:
        absent = f", for {ranks_text(wait.absent)}" if wait.absent else ""
        since = f" since {_clock(wait.since_ns)}" if wait.since_ns else ""
        verb = "waits" if len(wait.waiting) == 1 else "wait"
        where = f"{wait.call} #{wait.sequence_nr} of {wait.group.text}"
        yield f"{ranks_text(wait.waiting)} {verb} in {where}{since}{absent}"
    for state in found.ranks:
        for call in state.transfers:
            yield f"rank {state.rank} waits in {spelled(call)} (tag {call.tag}) with rank {call.peer} of group {call.group} since {_clock(call.enqueued_ns)}"
    for rank in sorted({*found.culprits, *(state.rank for state in found.dead)}):
        if rank in by_rank:
            yield f"{ranks_text([rank])} {_is_where(by_rank[rank])}"
    if found.missing:
        yield f"there is no box of {ranks_text(found.missing)}"
    if not (found.waits or found.mismatches or found.cycle or found.culprits or found.dead):
        yield "no rank is known to wait for another"


def _is_where(state: RankState) -> str:
    seconds = (state.last_ns - state.since_ns) / 1e9
    if state.is_alive:
        return f"is in {state.place}, for {seconds:.1f} s"
    return f"does not run any more; last seen at {_clock(state.last_ns)} in {state.place}"


def _roll_call(found: Autopsy) -> Iterator[str]:
    from otel_torchprof._record.autopsy import places, ranks_text

    for text, states in places(found):
        yield f"{ranks_text([state.rank for state in states])}: {text}"


def _clock(unix_ns: int) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(unix_ns / 1e9))}.{unix_ns % 10**9 // 10**8}"
