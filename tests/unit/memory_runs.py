"""Made-up recordings of operators and of the memory that they use, as batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from otel_torchprof._columns.batch import Batch
from otel_torchprof._columns.frame_info import (
    FrameInfo,
    ModuleInfo,
    OptimizerInfo,
    ParameterGroupInfo,
    ParameterInfo,
    TensorInfo,
)
from otel_torchprof._columns.schema import MEMORY_COLUMNS, Kind, Scope
from otel_torchprof._model.memory import Category, MemoryAction
from otel_torchprof._model.memory_categories import memory_changes

STRIDED_TENSOR = 1 | 7 << 8 | 8 << 16 | 1 << 32
"""The header of a tensor of floats with one dimension, and the flag that tells of its storage."""


def written_inputs(name: str, kinds: Any) -> tuple[bool, ...] | None:
    """Schemas: all in ``aten::`` are operators, and one that ends in ``_`` writes to its first input."""
    if not name.startswith("aten::"):
        return None
    return tuple(name.endswith("_") and place == 0 for place in range(len(kinds)))


@dataclass
class Run:
    """One thread, on which everything takes a microsecond. Addresses stand for tensors."""

    columns: dict[str, list[int]] = field(
        default_factory=lambda: {
            name: [] for name in ("start", "name", "parent", "kind", "scope", "fwd_thread", "inputs")
        }
    )
    names: list[str] = field(default_factory=lambda: [""])
    words: list[int] = field(default_factory=list)
    records: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    device: int = 0
    open: list[int] = field(default_factory=list)
    time: int = 1000
    modules: dict[int, ModuleInfo] = field(default_factory=dict)
    optimizers: dict[int, OptimizerInfo] = field(default_factory=dict)

    def begin(
        self, name: str, *inputs: int, kind: Kind = Kind.OPERATOR, scope: Scope = Scope.FUNCTION, number: int = 0
    ) -> None:
        """An event begins; ``inputs``: the addresses of tensors."""
        self.time += 1000
        if name not in self.names:
            self.names.append(name)
        values = (self.time, self.names.index(name), self.open[-1] if self.open else -1, kind, scope, number)
        offset = len(self.words) if inputs else -1
        for column, value in zip(self.columns.values(), (*values, offset), strict=True):
            column.append(value)
        self.open.append(len(self.columns["start"]) - 1)
        if inputs:
            self.words.append(len(inputs))
        for address in inputs:
            self.words += [STRIDED_TENSOR, 2, address, 8 | self.device << 48]

    def end(self) -> None:
        """The last one ends."""
        self.open.pop()

    def allocate(self, address: int, size: int = 8) -> None:
        """Memory, freed where the size is below 0."""
        self.time += 1000
        self.records.append((self.time, size, address, self.open[-1] + 1 if self.open else 0, self.device))

    def release(self, address: int, size: int = 8) -> None:
        """Memory is freed."""
        self.allocate(address, -size)

    def operator(self, name: str, *inputs: int, makes: int = 0) -> None:
        """An operator, and what it allocates."""
        self.begin(f"aten::{name}", *inputs)
        if makes:
            self.allocate(makes)
        self.end()

    def backward(self, *inputs: int, makes: int = 0, accumulates: bool = False) -> None:
        """A function of the backward pass, which makes something of its inputs or adds up a gradient."""
        self.begin(
            "torch::autograd::AccumulateGrad" if accumulates else "MulBackward0", *inputs, scope=Scope.BACKWARD_FUNCTION
        )
        self.operator("detach" if accumulates else "mul", *inputs, makes=makes)
        self.end()

    def module(self, name: str, *parameters: ParameterInfo) -> None:
        """A module is called, and returns."""
        self.begin(f"nn.Module: {name}", kind=Kind.FRAME)
        self.modules[self.names.index(f"nn.Module: {name}")] = ModuleInfo(name, name, name, parameters)
        self.end()

    def step(self, *parameters: ParameterInfo, number: int = 7) -> None:
        """An optimizer makes a step, and returns."""
        self.begin("step", kind=Kind.FRAME, number=number)
        self.optimizers[number] = OptimizerInfo("SGD", (ParameterGroupInfo({}, parameters),))
        self.end()

    def batch(self, **rest: Any) -> Batch:
        """What was recorded."""
        columns = {**self.columns, "end": self.columns["start"]}
        memory = {column.name: np.zeros(len(self.records), column.dtype) for column in MEMORY_COLUMNS}
        for name, values in zip(
            ("time", "bytes", "address", "event", "device_type"), zip(*self.records, strict=True), strict=False
        ):
            memory[name] = np.array(values, memory[name].dtype)
        info = FrameInfo(modules=self.modules, optimizers=self.optimizers)
        given = {"inputs": np.array(self.words, np.int64), "memory": memory, "frame_info": info, **rest}
        return Batch.of(columns, self.names, **given)

    def used(self, **rest: Any) -> list[tuple[str, str, int]]:
        """What happened, by time: action, category (before and after) and size."""
        changes = memory_changes(self.batch(**rest), written_inputs, {"cpu": 0, "cuda": 1}.__getitem__)
        return [
            (MemoryAction(action).name, " ".join(dict.fromkeys((Category(old).name, Category(new).name))), size)
            for _, action, size, old, new, _ in zip(*(column.tolist() for column in changes), strict=True)
        ]


def tensor(address: int) -> TensorInfo:
    """A tensor of two floats."""
    return TensorInfo((2,), (1,), "torch.float32", "torch.strided", "cpu", address, address)


def parameter(address: int, gradient: int = 0, state: int = 0, late: bool = False) -> ParameterInfo:
    """A parameter, with its gradient and what an optimizer keeps of it."""
    found = tensor(gradient) if gradient else None
    kept = {"momentum": tensor(state)} if state else {}
    return ParameterInfo("weight", "torch.nn.Parameter", True, tensor(address), found, kept, late)
