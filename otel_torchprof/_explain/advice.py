"""What to do about each verdict, and what would show that it is wrong."""

from __future__ import annotations

from typing import NamedTuple


class Advice(NamedTuple):
    """For one verdict."""

    meaning: str
    """Follows the verdict in a sentence: what the loop does."""
    next_action: str
    check: str
    """What a run would show if the verdict were wrong."""


ADVICE = {
    "input-bound": Advice(
        "of step time waits for data",
        "raise num_workers of the DataLoader, or make its dataset cheaper: decode and transform ahead of time, pin_memory=True",
        "take one batch before the loop and train on it again and again: if steps do not become shorter by that much, this is wrong",
    ),
    "optimizer-bound": Advice(
        "of step time is the optimizer's step, clipping and zeroing",
        "construct the optimizer with fused=True or foreach=True, or accumulate gradients and step less often",
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
        "look for other processes on the machine, and set torch.set_num_threads() and num_workers to the cores that there are",
        "run on a machine with nothing else on it: if steps do not become shorter, this is wrong",
    ),
    "gil": Advice(
        "of step time waits for Python's lock (GIL), which another Python thread has",
        "find that thread (py-spy dump, or --detail frames) and move its work into a process, or into code that lets go of the lock",
        "run without that thread: if steps do not become shorter by that much, this is wrong",
    ),
    "python-gap": Advice(
        "of step time no operator runs: Python gap, cause unknown",
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
        "launch less: torch.compile, mode='reduce-overhead' for graphs; fused or foreach optimizers; larger batches. Timing the device slows "
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
    "spikes": Advice(
        "of the time is in steps that are far longer than the others",
        "look at the slowest steps below, and record them with more detail: OTEL_TORCHPROF_POLICY=keep=slow",
        "record again: if other steps are slow, and as many, it does not depend on the program's data",
    ),
}
"""By verdict."""

BY_PHASE = {
    "data": "input-bound",
    "optimizer": "optimizer-bound",
    "collective": "communication-bound",
    "checkpoint": "checkpoint-bound",
    "evaluation": "evaluation-bound",
    "compile": "compile-bound",
    "gc": "gc-bound",
    "device_wait": "device-wait-bound",
}
"""The verdict on a step that is bound by a phase; those of the model's computing are left, which are one."""
COMPUTING = ("forward", "backward", "inference", "generate", "prefill", "decode")
WAITING = ("data", "checkpoint", "collective", "device_wait")
HARMLESS = frozenset(("compute-bound", "device-bound"))
"""Verdicts that are no fault."""
