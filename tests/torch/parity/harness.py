"""Runs a program under torch's profiler and under ours, and says of each what it told, in a form that can be compared.

Every fact is one function here. :data:`ALWAYS` lists those that are compared whatever was asked for, and :data:`OPTIONS`
what each option of the profilers adds to them.
"""

from __future__ import annotations

import enum
import inspect
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from observed import inside, run

import otel_torchprof as otp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

InfoField = "Callable[[list[Any]], list[Any]]"


def configured(**arguments: Any) -> Any:
    """Torch's configuration, of those of the arguments that it knows."""
    known = torch._C._profiler._ExperimentalConfig.__init__.__doc__ or ""
    return torch._C._profiler._ExperimentalConfig(
        **{name: value for name, value in arguments.items() if f"{name}:" in known}
    )


class Order(enum.Enum):
    """Which profiler runs where."""

    OURS_INSIDE = "ours inside torch's"
    TORCHS_INSIDE = "torch's inside ours"
    ALONE = "one after the other"


@dataclass(frozen=True)
class Option:
    """Arguments that both profilers take, and the facts that they add."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    info: tuple[str, ...] = ()
    torchs: dict[str, Any] = field(default_factory=dict)
    """Arguments that torch's needs besides, for the same facts."""
    together: bool = True
    """Whether both may run at the same time."""

    def __str__(self) -> str:
        return self.name


# ---- facts: from the events inside the step to one comparable value for each ----


def _is_passed_over(event: Any) -> bool:
    """Whether it is a call of a Python function, where torch's lists have none: up to 2.11. Ours have them with every torch."""
    return not is_told("python_module_id") and getattr(event, "is_python_function", False)


def _compared(events: Any) -> list[Any]:
    return [event for event in inside(events) if not _is_passed_over(event)]


def _path(event: Any) -> tuple[str, ...]:
    """Names from the outermost event to this one."""
    if event is None:
        return ()
    return (*_path(event.cpu_parent), *(() if _is_passed_over(event) else (_plain(event.name),)))


def _children(event: Any) -> Iterator[str]:
    for child in event.cpu_children:
        if _is_passed_over(child):
            yield from _children(child)
        else:
            yield _plain(child.name)


_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _plain(text: str) -> str:
    """A name without addresses, which C functions of an object carry in theirs."""
    return _ADDRESS.sub("0x", text)


def _attribute(name: str) -> InfoField:
    return lambda events: [getattr(event, name) for event in events]


def _text(name: str) -> InfoField:
    return lambda events: [_plain(getattr(event, name)) for event in events]


def _sequence_numbers(events: list[Any]) -> list[int]:
    """Counted from the first, since torch counts through the whole process."""
    first = min((event.sequence_nr for event in events if event.sequence_nr >= 0), default=0)
    return [event.sequence_nr - first if event.sequence_nr >= 0 else -1 for event in events]


def _flows(events: list[Any]) -> list[Any]:
    """Arrows from forward to backward, numbered as they come."""
    numbers = {0: 0}
    return [(numbers.setdefault(e.flow_id, len(numbers)), e.flow_type, e.flow_start) for e in events]


def _stacks(events: list[Any]) -> list[Any]:
    """Frames down to the one that runs the step; below are those of the test, which runs the profilers on other lines."""
    return [_above_the_test(event.stack or []) for event in events]


_SMALLEST = torch.autograd.profiler_util.FunctionEvent(0, "", 0, 0, 0)
_TABLE = inspect.signature(torch.autograd.profiler_util.EventList.table).parameters
_GROUPINGS = inspect.signature(torch.autograd.profiler_util.EventList.key_averages).parameters


def is_told(name: str) -> bool:
    """Whether the torch that is installed has this fact: the oldest ones lack attributes of events that later ones have."""
    attribute = {"flows": "flow_id"}.get(name, name)
    return hasattr(_SMALLEST, attribute) or name in _READ


_READ = ("path", "children", "stack")
"""Facts that are read of other attributes than one of their name."""


def _above_the_test(stack: list[str]) -> list[str]:
    marks = [place for place, frame in enumerate(stack) if "observed.py" in frame and frame.endswith(": run")]
    return [_plain(frame) for frame in (stack[: marks[0]] if marks else stack)]


_COUNTED = {f"aten::{name}" for name in ("add", "mul", "mm", "addmm", "bmm", "baddbmm", "conv2d")}
"""Operators whose operations torch counts. Ours counts those of others too (convolutions backward, attention)."""


def _flops(event: Any) -> Any:
    return event.flops if event.key in _COUNTED else 0


INFO_FIELDS: dict[str, InfoField] = {
    **{
        name: _attribute(name)
        for name in (
            *("overload_name", "activity_type", "thread", "fwd_thread", "scope", "count"),
            *("is_async", "is_remote", "is_user_annotation", "is_python_function", "is_legacy", "node_id"),
            *("device_index", "device_resource_id", "use_device", "linked_correlation_id", "event_metadata"),
            *("input_shapes", "structured_input_shapes", "structured_input_strides", "input_dtypes"),
            *("concrete_inputs", "kwinputs"),
            *("cpu_memory_usage", "self_cpu_memory_usage", "device_memory_usage", "self_device_memory_usage"),
        )
    },
    **{name: _text(name) for name in ("name", "trace_name", "key")},
    "path": lambda events: [_path(event) for event in events],
    "children": lambda events: [list(_children(event)) for event in events],
    "device_type": lambda events: [str(event.device_type) for event in events],
    "sequence_nr": _sequence_numbers,
    "flows": _flows,
    "flops": lambda events: [_flops(event) for event in events],
    "stack": _stacks,
}
"""How each fact is read."""

ALWAYS = (
    *("name", "trace_name", "key", "path", "children", "activity_type", "thread", "scope", "count", "device_type"),
    *("fwd_thread", "sequence_nr", "flows", "node_id", "device_index", "device_resource_id", "use_device"),
    *("is_async", "is_remote", "is_user_annotation", "is_python_function", "is_legacy", "linked_correlation_id"),
    *("event_metadata", "kwinputs", "overload_name", "flops", "cpu_memory_usage", "device_memory_usage", "stack"),
)
"""What is compared whatever was asked for; what nobody asked for is neutral in both."""

OPTIONS = (
    Option("nothing"),
    Option(
        "record_shapes",
        {"record_shapes": True},
        (
            *("input_shapes", "structured_input_shapes", "structured_input_strides"),
            *("input_dtypes", "concrete_inputs", "kwinputs"),
        ),
    ),
    Option("with_flops", {"with_flops": True}, ("flops",)),
    Option("profile_memory", {"profile_memory": True}, ("cpu_memory_usage", "self_cpu_memory_usage"), together=False),
    Option(
        "with_stack",
        {"with_stack": True},
        ("stack",),
        {"experimental_config": configured(verbose=True)},
        together=False,
    ),
    Option("with_modules", {"with_modules": True}),
    Option("acc_events", {"acc_events": True}),
)
"""What both profilers can be asked for."""


CHANGING = {
    ("reentrant_backward", "input_shapes"),
    ("reentrant_backward", "structured_input_shapes"),
    ("reentrant_backward", "flops"),
    ("gpt2", "concrete_inputs"),
    ("many_parameters", "concrete_inputs"),
}
"""Programs and facts that can be compared only where both profilers see one and the same run. Reentrant checkpointing is a
function written in Python, of whose inputs torch converts those that are no tensors for its own profiler alone. Adam counts
its steps and hands other numbers to its operators each time."""


MISTAKEN = {("torchscript", "stack")}
"""Programs and facts that torch gets wrong. TorchScript's stacks are kept in a list of their own, of which a backward function
takes one that is not its; all events after it have that of a later one. tests/torch/test_info.py compares the forward pass."""


def possible(program: str, order: Order, option: Option) -> Order:
    """The order, or the nearest one to it in which the program's facts can be compared."""
    if not option.together:
        return Order.ALONE
    if order is Order.ALONE and any((program, info_field) in CHANGING for info_field in option.info):
        return Order.OURS_INSIDE
    return order


# ---- running ----


def both(body: Callable[[], Any], order: Order, option: Option) -> tuple[Any, Any]:
    """Runs the program under both profilers; returns ours and torch's, stopped.

    One after the other, a run under torch's that nobody looks at comes first: the first run with memory on frees what
    was allocated before and so is of unknown size, and the first with stacks fills caches of Python's library.
    """
    ours, theirs = otp.profile(**option.arguments), torchs(option)
    outer, inner = (ours, theirs) if order is Order.TORCHS_INSIDE else (theirs, ours)
    if order is Order.ALONE:
        for prof in (torchs(option), theirs, ours):
            with prof:
                run(body)
        return ours, theirs
    with outer, inner:
        run(body)
    return ours, theirs


def torchs(option: Option) -> Any:
    """Torch's profiler of the CPU."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **option.arguments, **option.torchs)


def reported(prof: Any, names: tuple[str, ...]) -> dict[str, list[Any]]:
    """What a profile says of the events of the step, by fact."""
    events = _compared(prof.events())
    return {name: INFO_FIELDS[name](events) for name in names if is_told(name)}


# ---- texts ----

_TIME = re.compile(r" *-?\d+\.\d+(us|ms|s)\b")
_SHARE = re.compile(r" *(-?\d+\.\d+%|NaN)")
_BYTES = re.compile(r"(?<=\d )([KMG]?)b\b")
"""What torch 2.6 writes for KB and the like."""


def masked(table: str) -> str:
    """A table without its times, its shares of time and addresses, and with bytes called B."""
    return _plain(_BYTES.sub(r"\1B", _SHARE.sub(" share", _TIME.sub(" time", table))))


def averages(prof: Any, *grouping: Any) -> Any:
    """The averages of a profile: of the step's operators where Python's functions are among the events.

    Those are left out since their names may have addresses, and since what runs around the step is the test's own.
    """
    events = prof.events()
    if not is_told("is_python_function") or not any(event.is_python_function for event in events):
        return prof.key_averages(*grouping)
    options = {name: getattr(events, f"_{name}") for name in ("use_device", "profile_memory", "with_flops")}
    listed = type(events)((event for event in inside(events) if not event.is_python_function), **options)
    if not listed._tree_built:
        listed._tree_built = True  # torch's list insists on being told
    return listed.key_averages(*grouping)


def tables(prof: Any, *, stacks: bool = True) -> list[str]:
    """The masked tables of a profile: of the averages by all that they can be grouped by, with every way to shape a table."""
    texts = []
    # Where torch's lists have no calls, ours have some at the top that torch's have not.
    is_tree_torchs = is_told("python_module_id") or not prof.with_stack
    by_overload = ((False, 0, True),) if "group_by_overload_name" in _GROUPINGS else ()
    for grouping in ((), (True,), *(((False, 2),) if stacks else ()), *by_overload):
        listed = averages(prof, *grouping)
        for row in listed:
            row.stack, row.flops = _above_the_test(row.stack or [] if stacks else []), _flops(row)
        texts += [listed.table(), listed.table(row_limit=3, header="A header", top_level_events_only=is_tree_torchs)]
        unit = {"time_unit": "ms"} if "time_unit" in _TABLE else {}
        texts.append(listed.table(sort_by="count", row_limit=-1, max_name_column_width=20, **unit))
    return [masked(text) for text in texts]


def stack_lines(prof: Any, folder: Path) -> list[str]:
    """The lines of export_stacks of the step, as if every event had taken as long: those that take no time have no line."""
    events = prof.events()
    kind = otp.FunctionEvent if isinstance(events, otp.EventList) else torch.autograd.profiler_util.FunctionEvent
    stacks = (_above_the_test(event.stack or []) for event in _compared(events))
    listed = type(events)(kind(number, "", 1, 0, 10, stack=stack) for number, stack in enumerate(stacks))
    file = folder / f"{kind.__module__}.txt"
    listed.export_stacks(str(file), "self_cpu_time_total")
    return file.read_text().splitlines()


def sums(prof: Any) -> list[Any]:
    """What averages add up besides times, and the number of all events in the total."""
    names = filter(
        is_told, ("count", "overload_name", "cpu_memory_usage", "self_cpu_memory_usage", "is_user_annotation")
    )
    names = tuple(names)
    rows = averages(prof, True, 0, *((True,) if "group_by_overload_name" in _GROUPINGS else ()))
    found = [
        (row.key, str(row.input_shapes), row.scope, _flops(row), *(getattr(row, name) for name in names))
        for row in rows
    ]
    total = prof.events().total_average()
    return [*found, (total.key, total.count == len(prof.events()))]
