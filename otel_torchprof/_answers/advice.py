"""Advice for each verdict, and what fits a rank: nothing is advised that it does not have, or does already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .findings import WAITING, Advice
from .steps import LOADERS, PLACE_OF

if TYPE_CHECKING:
    from otel_torchprof._columns.arrays import Flags

    from .steps import Rank


ADVICE = {
    "input-bound": Advice(
        "of step time waits for data",
        "make batches ahead of time, in another process or thread, or cheaper: decode and transform the data once, before training. "
        "--detail ops tells what makes them",
        "take one batch before the loop and train on it again and again: if steps do not become shorter by that much, this is wrong",
    ),
    "optimizer-bound": Advice(
        "of step time is the optimizer's step, clipping and zeroing",
        "look at what it does (--detail ops, then otel-torchprof show), or accumulate gradients and step less often",
        "leave out optimizer.step() in a trial run: if steps do not become shorter by that much, this is wrong",
    ),
    "communication-bound": Advice(
        "of step time waits for other ranks",
        "explain the files of all ranks together: it names a rank that comes late; if none does, communicate less, or overlap it",
        "run the same on one rank: if its steps are as long, this is wrong",
    ),
    "checkpoint-bound": Advice(
        "of the time writes checkpoints",
        "write checkpoints less often, to a faster disk, or in the background (torch.distributed.checkpoint.async_save)",
        "turn checkpoints off in a trial run: if steps do not become shorter by that much, this is wrong",
    ),
    "evaluation-bound": Advice(
        "of the time evaluates the model",
        "evaluate less often, or on fewer batches",
        "turn evaluation off in a trial run: if steps do not become shorter by that much, this is wrong",
    ),
    "compile-bound": Advice(
        "of the time compiles again",
        "find out why with TORCH_LOGS=recompiles; pad inputs to few shapes, or mark the changing dimension as dynamic",
        "run with torch.compiler.set_stance('force_eager'): if the slow steps are still there, this is wrong",
    ),
    "gc-bound": Advice(
        "of step time is Python's garbage collector",
        "call gc.freeze() after set-up, collect only every so many steps, and keep fewer objects from step to step",
        "run with gc.disable(): if steps do not become shorter by that much, this is wrong",
    ),
    "device-wait-bound": Advice(
        "of step time waits for the device in a call that says so",
        "remove torch.cuda.synchronize() from the loop; if the device is busy all the time, make its work less",
        "remove the call in a trial run: if steps do not become shorter, the device is what they wait for",
    ),
    "operator-bound": Advice(
        "of step time is one operator",
        "look at its inputs (--shapes) and at who calls it (--detail modules): replace it, call it less often, or fuse it",
        "leave the operator out in a trial run: if steps do not become shorter by that much, this is wrong",
    ),
    "allocation-churn": Advice(
        "of step time, at least, takes memory from the system anew that was freed before",
        "keep large tensors from step to step (out=, in-place operators, zero_grad(set_to_none=False)), or let the allocator keep them: "
        "MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ of glibc, or another allocator (LD_PRELOAD of jemalloc or tcmalloc)",
        "run with MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296: if steps do not become shorter, this is wrong",
    ),
    "machine-busy": Advice(
        "of the time the loop's thread was ready to run, and other threads had the processor",
        "look for other processes on the machine",
        "run on a machine with nothing else on it: if steps do not become shorter, this is wrong",
    ),
    "gil": Advice(
        "of step time waits for Python's lock (GIL), which another Python thread has",
        "find that thread (py-spy dump, or --detail frames) and move its work into a process, or into code that lets go of the lock",
        "run without that thread: if steps do not become shorter by that much, this is wrong",
    ),
    "python-gap": Advice(
        "of step time no operator runs",
        "record Python's calls, --detail frames, and look at those with the most self time",
        "record with torch.compile or with a larger batch: if the gap grows with the batch, it is no overhead of Python",
    ),
    "device-bound": Advice(
        "of step time the device works, or has work waiting",
        "nothing is lost on the host: look at the operators that the device takes longest for",
        "halve the batch: if steps do not become shorter, this is wrong",
    ),
    "host-bound": Advice(
        "of step time the device waits for the host to launch something",
        "launch less: torch.compile, mode='reduce-overhead' for graphs; larger batches. Timing the device slows "
        "the host too: how long steps are without it, --detail steps tells",
        "double the batch: if steps become longer by as much, this is wrong",
    ),
    "compute-bound": Advice(
        "of step time the model computes",
        "this is what a step is for; to make it shorter, look at the longest operators: otel-torchprof show",
        "halve the batch: if steps do not become shorter, this is wrong",
    ),
    "straggler": Advice(
        "of the others' step time waits for one rank",
        "look at that rank alone: its data, its device, what else runs on its machine",
        "exchange two ranks' machines: if the same rank number stays late, it is the program's work and not the machine",
    ),
    "memory-growth": Advice(
        "",
        "look for what keeps tensors from step to step: lists of losses or outputs (append .item() or .detach()), caches, hooks, "
        "graphs that were never run backward. otp.profile(profile_memory=True, with_modules=True) says where they are allocated",
        "record ten times as many steps: if memory stops growing, something was filled once",
    ),
    "spikes": Advice(
        "of the time is in steps that are far longer than the others",
        "look at the slowest steps below, and record them with more detail: OTEL_TORCHPROF_POLICY=keep=slow",
        "record again: if other steps are slow, and as many, it does not depend on the program's data",
    ),
}
"""Advice by verdict."""

# ---- what fits a rank ----


_CHEAPER = "or make its dataset cheaper: decode and transform ahead of time"
_OF_LOADERS = dict(
    zip(
        LOADERS,
        (
            f"let processes of the DataLoader make batches (num_workers=2 or more), {_CHEAPER}",
            f"raise num_workers of the DataLoader to the cores that are free, {_CHEAPER}",
        ),
        strict=True,
    )
)
"""What to do, by the label of a loader."""
_UPDATES = frozenset(
    ("add_", "addcdiv_", "addcmul_", "copy_", "div", "div_", "lerp_", "mul", "mul_", "norm", "sqrt", "sub_", "zero_")
)
"""Operators of an optimizer that updates one parameter after another."""
_FEWEST_UPDATES = 3
"""Fewest different such operators among the longest of a step."""
_MUCH = 0.5
_FEWEST_PROCESSORS = 2


def loader_of(rank: Rank, chosen: Flags) -> str:
    """The label of the loader in the chosen steps; empty if unknown, as without operators."""
    names = {operator.name for step in np.flatnonzero(chosen).tolist() for operator in rank.operators[step]}
    return next((label for label in LOADERS if label in names), "")


def has_many_updates(rank: Rank, chosen: Flags) -> bool:
    """Whether the optimizer consists of many small operators: those that update parameters one after another are among the longest."""
    names: dict[str, float] = {}
    for step in np.flatnonzero(chosen).tolist():
        for operator in rank.operators[step]:
            names[operator.name] = names.get(operator.name, 0.0) + operator.seconds
    updates = {name: seconds for name, seconds in names.items() if name.removeprefix("aten::") in _UPDATES}
    spent = float(rank.phases[chosen, PLACE_OF["optimizer"]].sum())
    return len(updates) >= _FEWEST_UPDATES and sum(updates.values()) >= _MUCH * spent > 0


def fitting(verdict: str, rank: Rank, chosen: Flags) -> Advice:
    """The advice for a verdict on the chosen steps of a rank."""
    advice = ADVICE[verdict]
    if verdict == "input-bound" and (label := loader_of(rank, chosen)):
        return advice._replace(next_action=_OF_LOADERS[label])
    if verdict in {"optimizer-bound", "host-bound"} and has_many_updates(rank, chosen):
        return advice._replace(
            next_action=f"construct the optimizer with fused=True or foreach=True; {advice.next_action}"
        )
    if verdict == "machine-busy" and runs_much_besides(rank, chosen):
        return advice._replace(next_action=_OWN_THREADS)
    if verdict == "compute-bound" and _is_mostly_blocked(rank, chosen):
        return _BLOCKED._replace(next_action=_OF_RANKS) if rank.communicates else _BLOCKED
    return advice


_OWN_THREADS = (
    "the process's own threads take processors: set torch.set_num_threads(), and num_workers where there is a DataLoader, to the cores that "
    "there are, and look for other processes on the machine"
)
_OF_RANKS = "explain the files of all ranks together: it names a rank that comes late"
_BLOCKED = Advice(
    "of step time is in the model, where the loop's thread mostly waits",
    "find out what the loop's thread waits for in the model: other threads of torch (torch.set_num_threads), a lock, a device",
    "run with torch.set_num_threads(1), on one rank: if the thread is blocked as long, this is wrong",
)


def runs_much_besides(rank: Rank, chosen: Flags) -> bool:
    """Whether the process's own threads can be what had all processors, two at least, while the loop's thread was ready to run."""
    known = chosen & ~np.isnan(rank.other_threads) & ~np.isnan(rank.runnable)
    others, runnable, seconds = (
        float(column[known].sum()) for column in (rank.other_threads, rank.runnable, rank.seconds)
    )
    return bool(known.any()) and others >= max(_MUCH * seconds, _FEWEST_PROCESSORS * runnable)


def _is_mostly_blocked(rank: Rank, chosen: Flags) -> bool:
    """Whether the thread was blocked for half of the time that it was in no phase that waits."""
    known = chosen & ~np.isnan(rank.blocked)
    waits = rank.phases[known][:, [PLACE_OF[phase] for phase in WAITING]].sum(axis=1)
    blocked = np.maximum(rank.blocked[known] - waits, 0)
    return bool(known.any()) and float(blocked.sum()) >= _MUCH * float((rank.seconds[known] - waits).sum())
