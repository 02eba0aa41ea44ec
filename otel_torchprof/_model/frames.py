"""Calls of Python and C functions among the rows of a batch: around which rows they are, the batch without them, stacks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.arrays import distinct_values
from otel_torchprof._columns.cached import cached_property
from otel_torchprof._columns.frame_info import FrameInfo
from otel_torchprof._columns.joined import without
from otel_torchprof._columns.schema import Flag, Kind, Scope

from .flows import numbered_rows
from .inputs import InputKind, may_have, text_ids
from .span_table import extend_names
from .tree import lifted

if TYPE_CHECKING:
    from otel_torchprof._columns.batch import Batch, Names

    from .tree import TreeView

Array = npt.NDArray[Any]

MODULE_PREFIX = "nn.Module: "
"""Prefix of names of module calls; the class, ``_`` and the number of the instance follow."""


CALL = re.compile(r"(?P<file>.*)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
"""Matches the name of a call of a Python function."""
COLLECTION_PREFIX = "gc.collect: generation "
"""Prefix of names of garbage collector pauses, which are recorded as calls."""


def collection_generation(name: str) -> int | None:
    """Generation that the pause with this name collected; None for other names."""
    number = name.removeprefix(COLLECTION_PREFIX)
    return int(number) if number != name and number.isdecimal() else None


def frames_of(batch: Batch) -> npt.NDArray[np.bool_] | None:
    """Mask of the rows that are calls; None if there are none."""
    is_frame: npt.NDArray[np.bool_] = batch["kind"] == Kind.FRAME
    return is_frame if is_frame.any() else None


def nested_parents(parent: Array, start: Array, end: Array) -> Array:
    """Returns parents of rows such that the end of an event also ends all open events in it, as in torch's stacks.

    A label that a function enters may end after that function: events in between are inside the label, but not inside the function.
    """
    outlives = (parent >= 0) & (end > end[parent])
    affected = np.flatnonzero(_any_outwards(outlives, parent))
    if not affected.size:
        return parent
    parents = np.append(parent, parent.dtype.type(-1))
    closed = np.append(np.minimum(end, np.where(parent >= 0, end[parent], end)), np.iinfo(np.int64).max)
    position = np.full(len(parent) + 1, -1, dtype=np.int64)
    position[affected] = np.arange(len(affected))
    for level in levels(position[parent[affected]]):
        rows = affected[level]
        above = _first_open(parents, closed, parents[rows], start[rows])
        parents[rows] = above
        closed[rows] = np.minimum(end[rows], closed[above])
    return parents[:-1]


def _first_open(parent: Array, closed: Array, candidate: Array, start: Array) -> Array:
    """The candidates, or their nearest ancestors, that were not closed yet; -1 counts as open."""
    first_open = candidate.copy()
    moving = np.flatnonzero(closed[first_open] < start)
    while moving.size:
        first_open[moving] = parent[first_open[moving]]
        moving = moving[closed[first_open[moving]] < start[moving]]
    return first_open


def _any_outwards(flags: npt.NDArray[np.bool_], parent: Array) -> npt.NDArray[np.bool_]:
    """Whether any ancestor of a row has its flag set; by pointer doubling."""
    if not flags.any():
        return np.zeros(len(flags), dtype=np.bool_)
    jump = np.append(parent, np.int32(-1))
    has_flag: npt.NDArray[np.bool_] = np.append(flags, False)[jump]
    while (jump[:-1] >= 0).any():
        has_flag |= has_flag[jump]
        jump = jump[jump]
    return has_flag[:-1]


def levels(enclosing: Array) -> list[Array]:
    """Positions by how many others are around them, the top-level first. Each step looks twice as far outwards as the last."""
    depth = np.append((enclosing >= 0).astype(np.int64), 0)
    jump = np.append(enclosing, -1)
    while (jump[:-1] >= 0).any():
        depth += depth[jump]
        jump = jump[jump]
    depth = depth[:-1]
    order = np.argsort(depth, kind="stable")
    return np.split(order, np.cumsum(np.bincount(depth))[:-1])


def with_info(batch: Batch, info: FrameInfo) -> Batch:
    """Returns the batch with the metadata of the objects called in it, selected from all that the tracer has noted."""
    is_frame = frames_of(batch)
    if is_frame is None:
        return replace(batch, frame_info=FrameInfo(since=info.since))
    names, identities = batch["name"][is_frame], batch["fwd_thread"][is_frame]
    numbers = set(distinct(names)[0].tolist())
    steps = {number for number in info.optimizers if (identities == number).any()}
    return replace(batch, frame_info=info.chosen(numbers, steps))


class PythonIds(NamedTuple):
    """The numbers that torch gives to calls, by row of the batch; -1 for none."""

    own: npt.NDArray[np.int64]
    """Number of the call, from 1, by start."""
    caller: npt.NDArray[np.int64]
    """Number of the enclosing call."""
    module: npt.NDArray[np.int64]
    """Number of the module among those of its class, for calls of modules."""


def python_ids(batch: Batch) -> PythonIds | None:
    """The numbers of all calls; None where there are none."""
    is_frame = frames_of(batch)
    if is_frame is None:
        return None
    rows = np.flatnonzero(is_frame)
    own, caller, module = (np.full(len(batch) + 1, -1, dtype=np.int64) for _ in range(3))
    own[rows[np.argsort(batch["start"][rows], kind="stable")]] = np.arange(1, len(rows) + 1)
    caller[rows] = own[_callers(batch, is_frame)[rows]]
    names, name_of_row = distinct(batch["name"][rows])
    module[rows] = np.array([_module_number(batch.names[name]) for name in names.tolist()])[name_of_row]
    return PythonIds(own[:-1], caller[:-1], module[:-1])


def _callers(batch: Batch, is_frame: npt.NDArray[np.bool_]) -> Array:
    """The row of the innermost call around each row that had not returned; -1 for none."""
    caller = np.append(lifted(batch["parent"], ~is_frame), np.int32(-1))
    end = np.append(batch["end"], np.iinfo(np.int64).max)
    return _first_open(caller, end, caller[:-1], batch["start"])


def distinct(name: Array) -> tuple[Array, Array]:
    """Distinct values (names or other numbers from 0) in ascending order, and the index of each entry's value.

    As ``np.unique`` with ``return_inverse``, but without sorting if the numbers are small.
    """
    highest = int(name.max(initial=0))
    if highest > 8 * len(name) + 65536:
        return np.unique(name, return_inverse=True)
    occurs = np.zeros(highest + 1, dtype=np.bool_)
    occurs[name] = True
    used = np.flatnonzero(occurs)
    position = np.zeros(highest + 1, dtype=np.int64)
    position[used] = np.arange(len(used))
    return used, position[name]


def _module_number(name: str) -> int:
    return int(name.rpartition("_")[2]) if name.startswith(MODULE_PREFIX) else -1


def without_frames(batch: Batch) -> Batch:
    """The other rows, each under the nearest of them that was open around it; the batch itself where it has no calls."""
    is_frame = frames_of(batch)
    return batch if is_frame is None else without(batch, is_frame)


class ShortFrames:
    """Removes short calls from the batches of one recording, in the order of its drains.

    Their children move to their parents. Unfinished calls stay, and so do calls that an earlier batch reported as open, as
    they are the parents of events in that batch. Not thread-safe.
    """

    def __init__(self, seconds: float) -> None:
        self._shortest = seconds * 1e9
        self._reported: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    def without(self, batch: Batch) -> Batch:
        """The next batch without them; itself where there are none."""
        if self._shortest <= 0:
            return batch
        short = batch["kind"] == Kind.FRAME
        short &= batch["end"] - batch["start"] < self._shortest
        short &= (batch["flags"] & Flag.UNFINISHED) == 0
        if self._reported.size:
            short &= ~np.isin(batch["id"], self._reported)
        self._reported = batch.opens.id
        return without(batch, short)


# ---- Python stack of every event, from its enclosing calls: a code per event, equal for equal stacks ----

Codes = npt.NDArray[np.int64]

HIDDEN_STACK_ENTRIES = (
    ("autograd/__init__", "_make_grads"),
    ("autograd/__init__", "backward"),
    ("torch/tensor", "backward"),
    ("_internal/common_utils", "prof_callable"),
    ("_internal/common_utils", "prof_func_call"),
    ("_internal/common_utils", "prof_meth_call"),
)
"""Two parts each of names that torch keeps out of stacks (``torch.autograd.profiler_util._filter_stack_entry``)."""


@dataclass(frozen=True, eq=False)
class Stacks:
    """All different stacks, as a tree of their entries: each is its innermost entry, and the stack around that.

    Immutable, hence safe to share between threads.
    """

    outer: Codes
    """By code, the stack around the innermost entry; that of the empty stack, 0, is 0."""
    name: Codes
    """By code, the innermost entry, as an index into ``names``."""
    names: Names

    def __len__(self) -> int:
        return len(self.outer)

    def __getitem__(self, code: int) -> list[str]:
        """The entries, innermost first; a new list every time."""
        outer, entries = self._links
        stack = []
        while code:
            stack.append(entries[code])
            code = outer[code]
        return stack

    @cached_property
    def _links(self) -> tuple[list[int], list[str]]:
        """``outer``, and the texts of ``name``: a stack may be a hundred entries deep, and all are shared with others."""
        return self.outer.tolist(), [self.names[name] for name in self.name.tolist()]

    def innermost(self, entries: int) -> Codes:
        """Per code, a number that is equal for stacks with equal innermost ``entries``. Costs a sort for each entry."""
        numbers, at = np.zeros(len(self), dtype=np.int64), np.arange(len(self))
        for _ in range(entries):
            if not at.any():
                break
            entry = np.where(at > 0, self.name[at] + 1, 0)
            _, numbers = np.unique(numbers * (len(self.names) + 1) + entry, return_inverse=True)
            at = self.outer[at]
        return numbers

    def entries(self, codes: Codes) -> list[str]:
        """Distinct entries of the stacks with these codes; does not build the stacks."""
        met = np.zeros(len(self), dtype=np.bool_)
        met[0] = True
        moving = distinct_values(codes)
        while (moving := moving[~met[moving]]).size:
            met[moving] = True
            moving = distinct_values(self.outer[moving])
        return [self.names[name] for name in distinct_values(self.name[1:][met[1:]]).tolist()]


def stack_codes(view: TreeView) -> tuple[Codes, Stacks]:
    """The code of the stack of every event of a view, and the stacks by code.

    Costs nothing where no calls were recorded, else some 100 ns per event.
    """
    batch = view.batch
    is_frame, has_scripts = frames_of(batch), may_have(batch, InputKind.CALL_STACK)
    nothing = np.zeros(1, dtype=np.int64)
    codes, stacks = np.zeros(len(batch), dtype=np.int64), Stacks(nothing, nothing, batch.names)
    if is_frame is None and not has_scripts:
        return codes[: len(view)], stacks
    if is_frame is not None:
        is_displayed = is_frame & ~_left_out(batch, is_frame)[batch["name"]]
        codes, stacks = _own_codes(batch, is_displayed)
    if has_scripts:
        codes, stacks = _with_script(codes, stacks, text_ids(batch, InputKind.CALL_STACK))
    displayed = codes[view.rows]
    if (batch["scope"] == Scope.BACKWARD_FUNCTION).any():
        displayed = _with_forward(view, displayed)
    return displayed, stacks


def plain_stacks(batch: Batch) -> tuple[Codes, Stacks]:
    """Per row, the code of all calls around it; backward functions have the stack of the thread on which they ran.

    As in the traces that torch writes; its lists of events differ.
    """
    is_frame, has_scripts = frames_of(batch), may_have(batch, InputKind.CALL_STACK)
    nothing = np.zeros(1, dtype=np.int64)
    codes, stacks = np.zeros(len(batch), dtype=np.int64), Stacks(nothing, nothing, batch.names)
    if is_frame is not None:
        codes, stacks = _own_codes(batch, is_frame)
    if has_scripts:
        codes, stacks = _with_script(codes, stacks, text_ids(batch, InputKind.CALL_STACK))
    return codes, stacks


def _own_codes(batch: Batch, is_displayed: npt.NDArray[np.bool_]) -> tuple[Codes, Stacks]:
    """Returns per row the code of its enclosing displayed calls."""
    caller = lifted(nested_parents(batch["parent"], batch["start"], batch["end"]), ~is_displayed)
    frames = np.flatnonzero(is_displayed)
    position = np.full(len(batch) + 1, -1, dtype=np.int64)
    position[frames] = np.arange(len(frames))
    used, name = distinct(batch["name"][frames])
    inside, outer, entry = _grown(position[caller[frames]], name, len(used))
    code_within = np.append(inside, 0)  # last: code of events without an enclosing call
    return code_within[position[caller]], Stacks(outer, np.append(0, used[entry]).astype(np.int64), batch.names)


def _grown(enclosing: Array, name: Array, names: int) -> tuple[Codes, Codes, Codes]:
    """Returns per call the code of the stack inside it; per code, the code of the outer stack and (from code 1) the innermost name.

    The tree is made level by level, the top-level calls first.
    """
    inside = np.zeros(len(enclosing) + 1, dtype=np.int64)
    outers, entries, codes = [np.zeros(1, dtype=np.int64)], [np.empty(0, dtype=np.int64)], 1
    for level in levels(enclosing):
        keys, which = distinct(inside[enclosing[level]] * names + name[level])
        inside[level] = which + codes
        outers.append(keys // names)
        entries.append(keys % names)
        codes += len(keys)
    return inside[:-1], np.concatenate(outers), np.concatenate(entries)


def _with_script(codes: Codes, stacks: Stacks, scripts: npt.NDArray[np.uint32]) -> tuple[Codes, Stacks]:
    """Gives events of TorchScript the stack that TorchScript reports, as torch does. Codes per row."""
    outer, name, first = stacks.outer.tolist(), stacks.name.tolist(), len(stacks.names)
    entries: dict[str, int] = {}
    known: dict[tuple[int, int], int] = {}
    used, which = np.unique(scripts, return_inverse=True)
    code_of = []
    for text in used.tolist():
        code, lines = 0, stacks.names[text].split("\n") if text else []
        for line in reversed([line for line in lines if not _is_left_out(line)]):
            key = code, entries.setdefault(line, first + len(entries))
            if key not in known:
                known[key] = len(outer)
                outer.append(key[0])
                name.append(key[1])
            code = known[key]
        code_of.append(code)
    names = extend_names(stacks.names, list(entries))
    mixed = np.where(scripts != 0, np.array(code_of, dtype=np.int64)[which], codes)
    return mixed, Stacks(np.array(outer, dtype=np.int64), np.array(name, dtype=np.int64), names)


def _left_out(batch: Batch, is_frame: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Per name, whether calls of that name are omitted from stacks."""
    by_name = np.zeros(len(batch.names), dtype=np.bool_)
    used, _ = distinct(batch["name"][is_frame])
    by_name[[index for index in used.tolist() if _is_left_out(batch.names[index])]] = True
    return by_name


def _is_left_out(name: str) -> bool:
    return any(one in name and other in name for one, other in HIDDEN_STACK_ENTRIES)


def _with_forward(view: TreeView, codes: Codes) -> Codes:
    """Gives events of the backward pass the stack of the first forward operator with their sequence number; none without one."""
    batch, rows = view.batch, view.rows
    backward = _enclosing_backward(view)
    thread = np.array([thread.number for thread in batch.threads], dtype=np.int64)[batch["thread"][rows]]
    number = batch["sequence_nr"][numbered_rows(batch)[rows]]
    forward = np.flatnonzero((backward < 0) & (number >= 0))
    keys = _pairs(number[forward], thread[forward])
    used, first = np.unique(keys, return_index=True)
    within = np.flatnonzero(backward >= 0)
    above = rows[backward[within]]
    requested = _pairs(batch["sequence_nr"][above], batch["fwd_thread"][above].astype(np.int64))
    at = np.minimum(np.searchsorted(used, requested), max(len(used) - 1, 0))
    has_forward = used[at] == requested if len(used) else np.zeros(len(requested), dtype=np.bool_)
    result = codes.copy()
    result[within] = 0
    result[within[has_forward]] = codes[forward[first[at[has_forward]]]]
    return result


def _pairs(number: Array, thread: Array) -> Array:
    """Two whole numbers each, below 2**53, as something that can be sorted."""
    pairs = np.empty(len(number), dtype=np.complex128)
    pairs.real, pairs.imag = number, thread
    return pairs


def _enclosing_backward(view: TreeView) -> Array:
    """The innermost backward function that an event is or is in, -1 for none. Each step looks twice as far outwards."""
    own = np.arange(len(view))
    is_backward = view.batch["scope"][view.rows] == Scope.BACKWARD_FUNCTION
    jump = np.append(np.where(is_backward, own, view.parent), -1)
    while True:
        further = jump[jump]
        if np.array_equal(further, jump):
            return jump[:-1]
        jump = further
