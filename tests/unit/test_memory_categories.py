"""What memory is used for, told from made-up recordings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_runs import Run, parameter, written_inputs

from otel_torchprof._columns.schema import Scope
from otel_torchprof._model.memory import Category, MemoryAction
from otel_torchprof._model.memory_categories import memory_changes
from otel_torchprof._native.ffi import ffi, lib
from otel_torchprof._profile.memory_timeline import in_use

X, W, Y, G, M, Z = 0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000


def training(run: Run, *, with_module: bool, optimizer: bool = True) -> Run:
    """One step: forward, backward, and an update of the weight with momentum."""
    run.operator("randn", makes=X)
    run.operator("fill_", X)
    if with_module:
        run.module("Linear_0", parameter(W))
    run.operator("mul", X, W, makes=Y)
    run.operator("sum", Y, makes=Z)
    run.backward(Z, Y, makes=Z + 0x100)
    run.backward(Z + 0x100, X, makes=G)
    run.backward(G, accumulates=True)
    run.operator("clone", G, makes=M)
    if optimizer:
        run.step(parameter(W, gradient=G, state=M))
    run.operator("add_", W, M)
    return run


AT_THE_STEP = [
    ("PREEXISTING", "PARAMETER", 8),
    ("CREATE", "INPUT", 8),
    ("INCREMENT_VERSION", "INPUT", 8),
    ("CREATE", "ACTIVATION", 8),
    ("CREATE", "ACTIVATION", 8),
    ("CREATE", "AUTOGRAD_DETAIL", 8),
    ("CREATE", "GRADIENT", 8),
    ("CREATE", "OPTIMIZER_STATE", 8),
    ("INCREMENT_VERSION", "PARAMETER", 8),
]


@pytest.mark.parametrize("with_module", [True, False])
def test_a_step_of_training(with_module):
    """Every category but one, whether parameters are known by their modules or only by what is done with them."""
    assert training(Run(), with_module=with_module).used() == AT_THE_STEP


def test_without_calls():
    """Without what modules and optimizers say, the flow of data tells of parameters all the same, not of what is kept."""
    run = training(Run(), with_module=False, optimizer=False)
    found = run.used(frame_info=None)
    assert [line for line in found if line not in AT_THE_STEP] == [("CREATE", "UNKNOWN", 8)]


def test_without_inputs():
    """Without inputs, or without where these lie, nothing is known but sizes."""
    run = training(Run(), with_module=False, optimizer=False)
    for rest in ({"inputs": None}, {"kept": 1}):
        assert {category for _, category, _ in run.used(**rest)} == {"UNKNOWN"}


def test_temporary():
    """What an operator allocates and frees is temporary where a tensor was seen in it, else of none."""
    run = Run()
    run.begin("aten::conv")
    run.allocate(Y)
    run.operator("fill_", Y)
    run.release(Y)
    run.allocate(Z, 16)
    run.release(Z, 16)
    run.end()
    assert run.used() == [
        ("CREATE", "TEMPORARY", 8),
        ("DESTROY", "TEMPORARY", 8),
        ("CREATE", "UNKNOWN", 16),
        ("DESTROY", "UNKNOWN", 16),
    ]


def test_what_is_inside_an_operator_is_part_of_it():
    """Only the outermost operator counts, and a label around it does not; what it calls decides what it writes to."""
    run = training(Run(), with_module=True)
    before = len(run.used())
    run.begin("a label", scope=Scope.USER_SCOPE)
    run.begin("aten::outer", X)
    run.operator("inner_", X)
    run.operator("inner_", X)
    run.end()
    run.end()
    assert run.used()[before:] == [("INCREMENT_VERSION", "INPUT ACTIVATION", 8)]


def test_what_has_no_schema_may_write():
    """A backward function that runs no operator may have written to its inputs; one that runs some has done what these do."""
    run = training(Run(), with_module=True)
    before = len(run.used())
    run.begin("CustomBackward", X, scope=Scope.BACKWARD_FUNCTION)
    run.end()
    run.backward(X)
    assert run.used()[before:] == [("INCREMENT_VERSION", "INPUT UNKNOWN", 8)]


def test_an_address_is_used_again():
    """A block ends where it is freed, or where the next is allocated at its place; its use is not the next one's."""
    run = training(Run(), with_module=True)
    before = len(run.used())
    run.release(G)
    run.operator("empty", makes=G)
    run.operator("zero_", G)
    run.operator("empty", makes=W)
    run.operator("relu", W)
    assert run.used()[before:] == [
        ("DESTROY", "GRADIENT", 8),
        ("CREATE", "UNKNOWN", 8),
        ("INCREMENT_VERSION", "UNKNOWN", 8),
        ("CREATE", "UNKNOWN", 8),
        ("DESTROY", "PARAMETER", 8),
    ]


def test_a_block_of_unknown_size():
    """What was there before and is freed has the size that the allocator tells, else its storage's."""
    run = Run()
    run.operator("relu", X)
    run.operator("relu", Y)
    run.release(X, 512)
    run.release(Z, 64)
    assert sorted(run.used()) == [
        ("DESTROY", "UNKNOWN", 64),
        ("DESTROY", "UNKNOWN", 512),
        ("PREEXISTING", "UNKNOWN", 8),
        ("PREEXISTING", "UNKNOWN", 64),
        ("PREEXISTING", "UNKNOWN", 512),
    ]


def test_gradients_that_were_there_before():
    """A module's gradient counts at its first call; one that only the end knows is the block that lies there then."""
    run = Run()
    run.module("A", parameter(W, gradient=G))
    run.operator("zero_", G)
    run.release(G)
    run.module("B", parameter(Y, gradient=Z, late=True))
    run.operator("relu", Z)
    run.release(Z)
    run.operator("empty", makes=Z)
    run.operator("neg", Z)
    found = run.used()
    assert sorted(category for _, category, _ in found[:4]) == ["GRADIENT", "PARAMETER", "PARAMETER", "UNKNOWN"]
    assert found[4:] == [
        ("INCREMENT_VERSION", "GRADIENT", 8),
        ("DESTROY", "GRADIENT", 8),
        ("DESTROY", "UNKNOWN", 8),
        ("CREATE", "GRADIENT", 8),
    ]


def test_state_that_nobody_touched():
    """What an optimizer keeps is there before it is ever read."""
    run = Run()
    run.step(parameter(W, state=M))
    assert sorted(run.used()) == [("PREEXISTING", "OPTIMIZER_STATE", 8), ("PREEXISTING", "PARAMETER", 8)]


def test_devices_are_apart():
    """One address on two devices is two blocks."""
    run = Run()
    run.operator("empty", makes=X)
    run.operator("relu", X)
    run.device = 1
    run.operator("empty", makes=X)
    run.release(X)
    assert [(action, category) for action, category, _ in run.used()] == [("CREATE", "UNKNOWN")] * 2 + [
        ("DESTROY", "UNKNOWN")
    ]


ADDRESSES = st.sampled_from((W, X, Y, Z, 0))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("operator", "in place", "backward", "gradient", "allocate", "release", "module")),
        ADDRESSES,
        ADDRESSES,
    ),
    max_size=25,
)


def taken(run: Run, steps) -> Run:
    """A run of such steps; address 0 is none."""
    for kind, one, other in steps:
        if kind in {"operator", "in place"}:
            run.operator("f_" if kind == "in place" else "f", *filter(None, (one,)), makes=other)
        elif kind in {"backward", "gradient"}:
            run.backward(*filter(None, (one,)), makes=other, accumulates=kind == "gradient")
        elif kind == "module":
            run.module(f"m{one}", parameter(one or 1, gradient=other, late=one == X))
        else:
            run.allocate(one or 1, 8 if kind == "allocate" else -8)
    return run


@given(STEPS)
def test_no_recording_is_an_error(steps):
    """Whatever was recorded, however little it fits together: no category ever holds less than nothing, and as much comes as goes."""
    run = taken(Run(), [("allocate", 1, 0), *steps])
    changes = memory_changes(run.batch(), written_inputs, {"cpu": 0}.__getitem__)
    time, used = in_use(changes)
    assert (used >= 0).all()
    assert (np.diff(changes.time) >= 0).all()
    assert len(time) == len(used)
    came = changes.bytes[changes.action <= MemoryAction.CREATE].sum()
    assert came - changes.bytes[changes.action == MemoryAction.DESTROY].sum() == used[-1].sum()


# ---- against the rules as sets ----

BLOCKS = 5


@st.composite
def flows(draw):
    """Nodes, each with the blocks that it reads, makes and writes to, and what is known of the blocks."""
    kinds = [draw(st.sampled_from((Category.GRADIENT, Category.PARAMETER, Category.UNKNOWN))) for _ in range(BLOCKS)]
    node = st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, 2)), max_size=4))
    return kinds, [draw(st.booleans()) for _ in range(BLOCKS)], draw(st.lists(node, max_size=10))


def numbered_states(nodes):
    """Edges by node as (block, state read, state written) with each block's states counted from 0; how many each has."""
    count, seen, found = [1] * BLOCKS, set(), []
    for _, touched in nodes:
        edges = []
        for block, how in dict(touched).items():
            if how == 1 and block not in seen:
                edges.append((block, None, 0))
            elif how == 2:
                edges.append((block, count[block] - 1, count[block]))
                count[block] += 1
            else:
                edges.append((block, count[block] - 1, None))
            seen.add(block)
        found.append(edges)
    return found, count


class BySets:
    """The rules, as sets of states (block, number)."""

    def __init__(self, known, kept, nodes, count):
        edges = numbered_states(nodes)[0]
        self.known, self.kept, self.count, self.found = list(known), kept, count, {}
        self.reads = [{(b, r) for b, r, _ in of if r is not None} for of in edges]
        self.writes = [{(b, w) for b, _, w in of if w is not None} for of in edges]
        self.forward = [i for i, node in enumerate(nodes) if not node[0]]
        self.backward = [i for i, node in enumerate(nodes) if node[0]]
        self.order = range(len(nodes))
        self.learnt = {b for b in range(BLOCKS) if known[b] != Category.UNKNOWN}

    def category(self, state):
        known = self.known[state[0]]
        return known if known != Category.UNKNOWN else self.found.get(state, Category.UNKNOWN)

    def has_gradient(self, states):
        return any(self.known[block] == Category.GRADIENT for block, _ in states)

    def updated(self):
        found, before = set(), None
        while found != before:
            before = set(found)
            for i in self.order:
                sources = {b for b, _ in self.reads[i]} & (self.learnt | found)
                found |= sources | {b for b, _ in self.writes[i] if sources}
        return found

    def inputs(self):
        leads = set()
        for i in reversed(self.order):
            states = self.reads[i] | self.writes[i]
            if states & leads or any(b in self.learnt for b, _ in states):
                leads |= states
        return leads - {state for i in self.backward for state in self.writes[i]}

    def parameters(self):
        forward, beside, used = {s for s in self.found if self.category(s) == Category.INPUT}, set(), set()
        for i in self.forward:
            if self.reads[i] & forward and not self.has_gradient(self.reads[i] | self.writes[i]):
                forward |= self.writes[i]
                beside |= self.reads[i] - forward
        for i in reversed(self.order):
            if self.writes[i] & used or self.has_gradient(self.writes[i]):
                used |= self.reads[i]
        return {block for block, _ in beside & used}

    def activations(self):
        for i in self.forward:
            enclosing = {self.category(state) for state in self.reads[i]}
            follows = enclosing & {Category.INPUT, Category.ACTIVATION}
            for state in self.writes[i] if follows and enclosing <= follows | {Category.PARAMETER} else ():
                self.found.setdefault(state, Category.ACTIVATION)

    def details(self):
        for i in self.backward:
            for block, number in sorted(self.writes[i]):
                old = self.category((block, number - 1)) if number else Category.UNKNOWN
                if old in {Category.UNKNOWN, Category.AUTOGRAD_DETAIL}:
                    self.found.setdefault((block, number), Category.AUTOGRAD_DETAIL)

    def run(self):
        updated = self.updated()
        self.found = {state: Category.INPUT for state in self.inputs() if state[0] not in updated}
        for block in self.parameters() & updated:
            self.known[block] = Category.PARAMETER
        self.activations()
        for block in range(BLOCKS):
            self.known[block] = Category.OPTIMIZER_STATE if self.kept[block] else self.known[block]
        self.details()
        return [self.category((b, n)) for b in range(BLOCKS) for n in range(self.count[b])]


@given(flows())
def test_the_passes_keep_to_the_rules(given_flow):
    """The native passes find what the rules say as sets, on any flow of data."""
    known, kept, nodes = given_flow
    edges, count = numbered_states(nodes)
    first = np.concatenate(([0], np.cumsum(count))).astype(np.int32)
    flat = [edge for of in edges for edge in of]

    def states(place):
        return np.array([-1 if e[place] is None else first[e[0]] + e[place] for e in flat], np.int32)

    arrays = {
        "first_edge": np.concatenate(([0], np.cumsum([len(of) for of in edges]))).astype(np.int64),
        "is_backward": np.array([node[0] for node in nodes], np.uint8),
        "block": np.array([edge[0] for edge in flat], np.int32),
        "reads": states(1),
        "writes": states(2),
        "first_state": first,
        "is_optimizer_state": np.array(kept, np.uint8),
        "of_block": np.array(known, np.uint8),
        "of_state": np.zeros(int(first[-1]), np.uint8),
    }
    flow = ffi.new("otp_memory_flow *")
    flow.node_count, flow.block_count, flow.state_count = len(nodes), BLOCKS, int(first[-1])
    for name, array in arrays.items():
        setattr(flow, name, ffi.cast(f"{array.dtype}_t *", array.ctypes.data))
    assert lib.otp_memory_categories(flow) == 0
    assert arrays["of_state"].tolist() == BySets(known, kept, nodes, count).run()
