"""What the threads of a process do at one moment: Python calls and open events, merged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import PHASE_PREFIX
from otel_torchprof._columns.samples import Call
from otel_torchprof._columns.schema import Kind
from otel_torchprof._files.rank_state import rank_of, stacks_of_program

from .running import OpenThread, open_threads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_torchprof._native.blackbox import Contents

    from .running import OpenCall

_MODULES, _CALL, _OUTER_CALL = "torch/nn/modules/module.py", "_call_impl", "_wrapped_call_impl"
_FILES = {
    "data": ("torch/utils/data/dataloader.py",),
    "forward": (_MODULES,),
    "inference": (_MODULES,),
    "evaluation": (_MODULES,),
    "generate": ("transformers/generation/utils.py",),
    "prefill": (_MODULES,),
    "decode": (_MODULES,),
    "backward": ("torch/_tensor.py", "torch/autograd/__init__.py"),
    "optimizer": ("torch/optim/optimizer.py",),
    "checkpoint": ("torch/serialization.py",),
    "collective": ("torch/distributed/distributed_c10d.py",),
}
"""By phase, the files that have the call which the phase is."""


_NOTHING = OpenThread(0, "", ())


class RunningCall(NamedTuple):
    """A Python call that runs, or an open event."""

    kind: str
    """``python``, or the kind of the event."""
    name: str
    """The function, or the event."""
    file: str = ""
    """Path of the file; of Python calls."""
    line: int = 0
    since_ns: int = 0
    """When the event began, Unix ns; 0 for Python calls, of which it is not known."""


class ThreadDump(NamedTuple):
    """What a thread does: the root first."""

    os_tid: int
    """0: not known."""
    name: str
    places: Sequence[RunningCall]


class ProcessDump(NamedTuple):
    """What a process does."""

    pid: int
    program: str
    rank: int | None
    time_ns: int
    """Unix ns."""
    threads: Sequence[ThreadDump]
    notes: Sequence[str]
    """What is not known, and why."""

    def plain(self) -> dict[str, Any]:
        """As JSON values; times in Unix ns."""
        threads = [
            {**thread._asdict(), "places": [place._asdict() for place in thread.places]} for thread in self.threads
        ]
        return {**self._asdict(), "threads": threads, "notes": list(self.notes)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ProcessDump:
        """From such values."""
        threads = [
            ThreadDump(each["os_tid"], each["name"], [RunningCall(**place) for place in each["places"]])
            for each in values["threads"]
        ]
        return cls(**{**values, "threads": threads})


def merged(stack: Sequence[Call], calls: Sequence[OpenCall]) -> list[RunningCall]:
    """Merges a thread's Python stack with its open events, in both and in the result the outer ones first.

    A phase or module comes before the Python call in torch that it is. Nothing says where other events are: they come before the next phase or
    module, or at the end.
    """
    places: list[RunningCall] = []
    waiting: list[OpenCall] = []
    done = 0
    next_of = {Kind.PHASE: 0, Kind.MODULE: 0}
    for call in calls:
        waiting.append(call)
        at = _place_of(call, stack, max(done, next_of.get(call.kind, 0)))
        if at is not None:
            next_of[call.kind] = at + 1
            at -= at > done and stack[at].function == _CALL and stack[at - 1].function == _OUTER_CALL
            places += map(_of_python, stack[done:at])
            places += map(_of_event, waiting)
            waiting, done = [], at
    return [*places, *map(_of_python, stack[done:]), *map(_of_event, waiting)]


def _place_of(call: OpenCall, stack: Sequence[Call], begin: int) -> int | None:
    """Index of the Python call that a phase or module is, from an index on; None if it is not known."""
    files: tuple[str, ...] = ()
    if call.kind == Kind.PHASE:
        files = _FILES.get(call.name.removeprefix(PHASE_PREFIX), ())
    elif call.kind == Kind.MODULE:
        files = (_MODULES,)
    if not files:
        return None
    for at in range(begin, len(stack)):
        if stack[at].file.endswith(files) and (files != (_MODULES,) or stack[at].function == _CALL):
            return at
    return None


def _of_python(call: Call) -> RunningCall:
    return RunningCall("python", call.function, call.file, call.line)


def _of_event(call: OpenCall) -> RunningCall:
    return RunningCall(call.kind.name.lower(), call.name, since_ns=call.since_ns)


def threads_of(
    pid: int, stacks: Mapping[tuple[int, str], Sequence[Call]], contents: Contents | None
) -> list[ThreadDump]:
    """Merges the stacks of threads (the outer calls first, by system id and name) with what is open in the box; the main thread first."""
    opened = {} if contents is None else {thread.os_tid: thread for thread in open_threads(contents)}
    threads = [
        ThreadDump(os_tid, name or found.name, merged(stack, found.calls))
        for (os_tid, name), stack in stacks.items()
        for found in (opened.pop(os_tid, _NOTHING),)
    ]
    threads += [ThreadDump(each.os_tid, each.name, merged([], each.calls)) for each in opened.values()]
    threads.sort(key=lambda thread: thread.os_tid != pid)
    return threads


def dump_of_box(contents: Contents, time_ns: int, notes: Sequence[str]) -> ProcessDump:
    """What a process does that does not answer: what is open in its box, and the stacks that its hang watch wrote, if it did."""
    stacks = _stacks_of_hang("\n".join(stacks_of_program(contents.stacks)))
    if stacks:
        seconds = (time_ns - contents.hang_since_ns) / 1e9
        found = f"stacks are those that the hang watch wrote, of a thread that has done nothing for {seconds:.0f} s"
    else:
        found = "no Python stacks: hang=60 in OTEL_TORCHPROF_BLACKBOX writes them when a thread hangs"
    program = str(contents.info.get("program") or "")
    named = {(os_tid, "main" if os_tid == contents.pid else ""): stack for os_tid, stack in stacks.items()}
    threads = threads_of(contents.pid, named, contents)
    return ProcessDump(contents.pid, program, rank_of(contents), time_ns, threads, [*notes, found])


def _stacks_of_hang(text: str) -> dict[int, list[Call]]:
    stacks: dict[int, list[Call]] = {}
    for part in re.split(r"^(?=Thread \d+ )", text, flags=re.MULTILINE):
        head = re.match(r"Thread (\d+) ", part)
        calls = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', part, re.MULTILINE)
        if head and calls:
            stacks[int(head[1])] = [Call(file, int(line), function) for file, line, function in reversed(calls)]
    return stacks
