"""Events of a trace of torch's profiler, as Kineto writes them: operators, calls, labels, memory, kernels."""

from __future__ import annotations

from typing import Any


def event(name: str, ts: Any, dur: Any, *, tid: int = 2, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    """A slice of a thread."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(
    name: str,
    ts: float,
    dur: float,
    external_id: int,
    correlation: int,
    *,
    cat: str = "kernel",
    stream: int = 7,
    **args: Any,
) -> dict[str, Any]:
    """Work of a device."""
    args = {"External id": external_id, "device": 0, "stream": stream, "correlation": correlation, **args}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def memory(ts: float, size: int, total: int) -> dict[str, Any]:
    """An allocation, or a release."""
    args = {"Bytes": size, "Total Allocated": total, "Device Type": 0, "Device Id": -1, "Addr": 64}
    return {"ph": "i", "name": "[memory]", "pid": 1, "tid": 2, "ts": ts, "args": args}


def cuda_trace() -> list[dict[str, Any]]:
    """Two operators in a label, their calls of the runtime, and their kernels."""
    return [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7 "}},
        event("step", 0, 40, cat="user_annotation", **{"External id": 1}),
        event("aten::linear", 1, 20, **{"External id": 2}),
        event("aten::addmm", 2, 15, **{"External id": 3}),
        event("cudaLaunchKernel", 5, 4, cat="cuda_runtime", **{"External id": 3, "correlation": 91}),
        event("aten::copy_", 25, 10, **{"External id": 4}),
        event("cudaMemcpyAsync", 27, 2, cat="cuda_runtime", **{"External id": 4, "correlation": 92}),
        kernel("gemm", 30, 100, 3, 91),
        kernel("splitK", 130, 20, 3, 91),
        kernel("Memcpy HtoD", 150, 5, 4, 92, cat="gpu_memcpy", stream=8, bytes=4096),
        kernel("step", 30, 125, 1, 0, cat="gpu_user_annotation"),
        kernel("Stream Wait Event", 30, 1, 0, 93, cat="cuda_sync"),
    ]


def training_trace() -> list[dict[str, Any]]:
    """The same in a step, with calls, inputs, memory, a backward pass, pairs of begin and end, and what is no event of a profile."""
    inputs = {
        "Input Dims": [[2, 3], [], [[4], [5, 6]]],
        "Input type": ["float", "Scalar", "TensorList"],
        "Input Strides": [[1, 2], [], [[1], [6, 1]]],
        "Concrete Inputs": ["", "0.5", "[1, 2]"],
    }
    numbers = {"Sequence number": 3, "Fwd thread id": 1}
    pair = {"cat": "python_function", "name": "pair", "pid": 1, "tid": 2, "id2": {"local": "7"}}
    return [
        *cuda_trace(),
        event("ProfilerStep#1", 0, 400, cat="user_annotation", **{"External id": 9}),
        event("call", 200, 100, cat="python_function", **{"Python id": 1}),
        event("aten::mm", 210, 10, **inputs, **{"Sequence number": 3, "Fwd thread id": 0}),
        memory(212, 100, 100),
        memory(230, -40, 60),
        event("autograd::engine::evaluate_function: MmBackward0", 310, 50, tid=3, **numbers),
        event("MmBackward0", 311, 30, tid=3, **numbers),
        event(
            "aten::add",
            380,
            5,
            span_id="00000000000000a1",
            parent_id="",
            attributes={
                "torch.op.input_shapes": "[[2, 3], []]",
                "torch.op.input_dtypes": "['float', 'Scalar']",
                "torch.op.concrete_inputs": "[None, 0.5]",
                "torch.phase.name": "forward",
                "torch.op.sequence_nr": 4,
            },
        ),
        {**pair, "ph": "b", "ts": 250},
        {**pair, "ph": "e", "ts": 350},
        {"ph": "B", "name": "begun", "pid": 1, "tid": 2, "ts": 360},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 370},
        {"ph": "C", "name": "counter", "pid": 1, "ts": 1, "args": {"v": 1}},
        event("PyTorch Profiler (0)", 0, 500, cat="Trace"),
    ]
