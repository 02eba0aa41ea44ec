"""What is known of every operator beside its name: as torch's profiler tells it, in events and in Chrome JSON."""

from __future__ import annotations

import json
import warnings

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from observed import STEP, run, torchs  # noqa: E402
from odd_programs import Elsewhere  # noqa: E402
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._encode import chrome  # noqa: E402
from otel_torchprof._model.inputs import InputKind, overload_codes, script_stack, text_ids  # noqa: E402  # noqa: E402
from otel_torchprof._model.tree import torch_view  # noqa: E402
from otel_torchprof._profile.events import EventList  # noqa: E402
from otel_torchprof._record.recording import ProfileSegment  # noqa: E402
from otel_torchprof._record.source import RecordingOptions  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of features in beta
X = torch.randn(3, 4)
F = torch.nn.functional

INFO_FIELDS = (
    "name",
    "overload_name",
    "input_shapes",
    "structured_input_shapes",
    "structured_input_strides",
    "input_dtypes",
    "concrete_inputs",
    "kwinputs",
    "is_user_annotation",
    "scope",
    "node_id",
    "is_async",
)
ARGUMENTS = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs", "Module Hierarchy")


def dtypes():
    """Tensors of every type that torch has."""
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        if not str(dtype).startswith(("torch.q", "torch.uint4x", "torch.uint2x")):
            torch.empty(4, 2, dtype=torch.uint8).view(torch.uint8).to("meta")
            torch.empty(4, 2, dtype=dtype, device="meta").t()


def quantized():
    """Tensors of whole numbers that stand for others."""
    for dtype in (torch.quint8, torch.qint8, torch.qint32):
        torch.quantize_per_tensor(X, 0.1, 0, dtype).t()


def strides():
    """Tensors that are laid out in every way."""
    X.t().neg()
    X[:, ::2].neg()
    torch.ones(1).expand(3, 4).neg()
    torch.ones(0, 3).neg()
    torch.ones(3, 0).t().neg()
    torch.tensor(1.0).neg()
    torch.ones(1, 3).as_strided((1, 3), (7, 1)).neg()
    torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last).neg()
    X.to_sparse().neg()
    X.to_sparse_csr().sin()
    X.to_mkldnn().relu()
    torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)]).neg()


def numbers():
    """Numbers of every kind, where operators take them."""
    torch.add(X, 2)
    torch.add(X, 2.5, alpha=3)
    torch.full((2, 2), 1 / 3)
    torch.full((2,), float("nan"))
    torch.full((2,), float("-inf"))
    torch.full((1,), 1e300, dtype=torch.double)
    torch.full((1,), 1 + 2j)
    torch.clamp(X, None, 1.0)
    X.div(2, rounding_mode="floor")
    F.layer_norm(X, (4,), None, None)
    X.to(torch.double)


def lists():
    """Lists of numbers and of tensors, long ones too."""
    X.sum(dim=[0, 1])
    torch.ops.aten.sum.dim_IntList(X, [])
    X.reshape([1] * 28 + [3, 4])
    X.reshape([1] * 29 + [3, 4])
    F.interpolate(torch.ones(1, 1, 4, 4), scale_factor=[1.5, 2.0])
    torch.ops.aten._foreach_add.ScalarList([X] * 3, [1, 2.5, True])
    torch.ops.aten._foreach_add.ScalarList([X] * 31, [1.0] * 31)
    torch.cat([X, X.t().contiguous().t()])
    torch.cat([X] * 31)
    X[:, None][torch.tensor([0, 1]), :, torch.tensor([0, 1])]


def anything():
    """Inputs that no operator takes, as a label of torch's own can have them."""
    values = [10.0**n for n in (-5, 9, 15, 19, 22, 300)] + [-0.0, 5e-324, 2.0**53, 2.0**63, 1e9 + 0.5]
    with _RecordFunctionFast("doubles", values):
        pass
    with _RecordFunctionFast("complex", [1 + 2j, 1 - 2j, 0j, complex(float("nan"), -0.0)]):
        pass
    with _RecordFunctionFast("lists", [[1.5], [1 + 2j], [True], [], [1] * 30, [1] * 31, [1, "x"], (1, 2)]):
        pass
    with _RecordFunctionFast("tensors", [[X] * 30, [X] * 31, [X, 1], [None, X], {"a": 1}, "text", None, -(2**63)]):
        pass


def keywords():
    """Keyword inputs."""
    given = {"i": 3, "f": 2.5, "b": True, "s": "text", "n": None, "t": X, "c": 1 + 2j, "l": [1, 2], "sl": ["a", "b"]}
    with _RecordFunctionFast("with keywords", [X], given), _RecordFunctionFast("keywords alone", [], {"k": 3}):
        pass


def labels():
    """Torch's labels, with arguments and without."""
    with torch.profiler.record_function("plain"), torch.profiler.record_function("args", 'an "argument"'):
        pass
    with torch.profiler.record_function("empty", ""):
        pass


def symbolic():
    """Sizes that are symbols, alone and among the inputs."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
        y = mode.from_tensor(torch.ones(3, 4), symbolic_context=context)
        (y + y).reshape(y.shape[0] * 2, -1).sum()
        torch.cat([y, y])
        (y * y.shape[0]).expand(2, *y.shape)


def transformed():
    """Tensors that stand for many."""
    torch.vmap(lambda x: x.sin() + 1)(X)
    torch.func.grad(lambda x: (x**2).sum())(X)


def inner(x):
    """Called by a script."""
    return x.neg()


def scripted_function(x):
    """A script that calls another."""
    return torch.relu(inner(x * 2)) + 1


class Block(torch.nn.Module):
    """A module in a module."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        """A line of its own."""
        return torch.relu(self.linear(x))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated
    SCRIPT = torch.jit.script(scripted_function)
    SCRIPTED = torch.jit.script(Block())


def scripted():
    """TorchScript. Forwards only: after a backward function torch gives each event the place of a later one."""
    SCRIPT(X)
    SCRIPTED(X).sum()


BODIES = [
    dtypes,
    quantized,
    strides,
    numbers,
    lists,
    anything,
    keywords,
    labels,
    symbolic,
    transformed,
    scripted,
]
ALL = RecordingOptions(operators=True, inputs=True, overloads=True, modules=True)


def recorded(body, requested=ALL, **torchs_options):
    """The body under both: our batch and torch's profile."""
    for _ in range(3):
        body()
    recording = ProfileSegment(requested)
    with torchs(**torchs_options) as theirs:
        recording.start()
        run(body)
        recording.stop()
    return recording.batch(), theirs


def inside(events):
    """The events from the marked step on."""
    names = [event.name for event in events]
    return list(events)[names.index(STEP) :]


def info_of(events):
    """Facts per event; texts, so that a number that is none is equal to itself."""
    return [{name: _text(getattr(event, name)) for name in INFO_FIELDS} for event in inside(events)]


def _text(value):
    return str(sorted(value.items())) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("body", BODIES)
def test_events_tell_what_torchs_tell(body):
    """Shapes, strides, types, values, keywords, overloads and what sort of event it is: the same for every event."""
    options = {"experimental_config": _ExperimentalConfig(capture_overload_names=True)}
    batch, theirs = recorded(body, shapes=True, with_modules=True, **options)
    ours = info_of(EventList.of(batch, origin_ns=0))
    assert ours == info_of(theirs.events())
    assert len(ours) > 2


def arguments(trace):
    """Name and arguments of every slice of an operator or label, from the marked step on."""
    slices = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in {"cpu_op", "user_annotation"}]
    slices.sort(key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    found = [(e["name"], {key: e["args"][key] for key in ARGUMENTS if key in e["args"]}) for e in slices]
    return found[[name for name, _ in found].index(STEP) :]


@pytest.mark.parametrize("body", [body for body in BODIES if body is not keywords])
def test_chrome_json_tells_what_kinetos_tells(body, tmp_path):
    """Names with overloads, and the arguments of every slice, are those that torch writes."""
    options = {"experimental_config": _ExperimentalConfig(capture_overload_names=True)}
    batch, theirs = recorded(body, shapes=True, with_modules=True, **options)
    theirs.export_chrome_trace(str(tmp_path / "theirs.json"))
    ours = json.loads(b"".join(chrome.encode(batch)))
    assert arguments(ours) == arguments(json.loads((tmp_path / "theirs.json").read_text()))


def test_keywords_are_arguments_of_their_slices():
    """Keyword inputs come as JSON values, those too that Kineto skips; a text may hold anything."""
    expected = {"i": 3, "f": 2.5, "b": True, "s": 'a "b"\n', "l": [1, 2], "sl": ["ä"]}

    def body():
        with _RecordFunctionFast("f", [X], {**expected, "t": X, "x": None}):
            pass

    batch, _ = recorded(body, shapes=True)
    trace = json.loads(b"".join(chrome.encode(batch)))
    [found] = [event["args"] for event in trace["traceEvents"] if event["name"] == "f"]
    assert {key: found[key] for key in found if key in {*expected, "x"}} == expected


def test_backward_operators_of_a_script_have_its_modules():
    """What a script's backward pass runs is inside of it, also after backward functions; what is outside is not."""
    batch, _ = recorded(lambda: SCRIPTED(X).sum().backward())
    hierarchy = text_ids(batch, InputKind.MODULE_HIERARCHY)
    names = [batch.names[name] for name in batch["name"].tolist()]
    found = {name: batch.names[text] for name, text in zip(names, hierarchy.tolist(), strict=True)}
    assert found["aten::mm"] == "TOP()::<backward op>"
    assert not found["torch::autograd::AccumulateGrad"]
    assert not found["SumBackward0"]


def test_call_stacks_of_torchscript():
    """Operators in a script have its lines, innermost first; their slices have them as Kineto writes them."""
    batch, theirs = recorded(scripted, RecordingOptions(operators=True, frames=True), with_stack=True)
    rows = {batch.names[name]: row for row, name in enumerate(batch["name"].tolist())}
    stack = script_stack(batch, rows["aten::neg"])
    assert [line.rpartition(": ")[2] for line in stack] == ["inner", "scripted_function"]
    assert all(f"{__file__}(" in line for line in stack)
    assert script_stack(batch, rows["aten::sum"]) == []
    events = {event["name"]: event for event in json.loads(b"".join(chrome.encode(batch)))["traceEvents"]}
    assert events["aten::neg"]["args"]["Call stack"] == "".join(f"{line};" for line in stack)
    assert theirs.events()


@pytest.mark.parametrize(
    ("requested", "has"),
    [
        (RecordingOptions(operators=True), set()),
        (RecordingOptions(operators=True, inputs=True), {"input_shapes"}),
        (RecordingOptions(operators=True, overloads=True), {"overload_name"}),
        (RecordingOptions(operators=True, inputs=True, overloads=True), {"input_shapes", "overload_name"}),
    ],
)
def test_a_recording_has_what_it_asked_for_only(requested, has):
    """What another one that runs at the same time wants to know is not shown."""
    everything, own = ProfileSegment(ALL), ProfileSegment(requested)
    everything.start()
    own.start()
    torch.mul(X, X)
    own.stop()
    everything.stop()
    [event] = EventList.of(own.batch(), origin_ns=0)
    assert {name for name in ("input_shapes", "overload_name") if getattr(event, name)} == has
    [event] = EventList.of(everything.batch(), origin_ns=0)
    assert (event.input_shapes, event.overload_name) == ([[3, 4], [3, 4]], "Tensor")


def test_who_asks_for_nothing_pays_for_nothing():
    """After a recording with everything, one without keeps no words at all."""
    recorded(numbers)
    recording = ProfileSegment(RecordingOptions(operators=True))
    recording.start()
    X.neg()
    recording.stop()
    assert recording.batch().inputs is None


def test_overloads_of_a_group():
    """A number per event tells overloads apart, and a list has their names."""
    recording = ProfileSegment(RecordingOptions(operators=True, overloads=True))
    recording.start()
    torch.mul(X, X)
    X.neg()
    torch.mul(X, X)
    recording.stop()
    codes, names = overload_codes(torch_view(recording.batch()))
    assert [names[code] for code in codes.tolist()] == ["Tensor", "", "Tensor"]


class LayoutElsewhere(Elsewhere):
    """A tensor whose layout only Python knows."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dispatch_layout=True)


def test_python_is_never_asked_for_the_layout():
    """A subclass that computes its layout in Python is not called by the recording, which has its shape."""
    tensor = LayoutElsewhere(X)
    with otp.profile(record_shapes=True) as prof:
        asked = Elsewhere.asked, LayoutElsewhere.asked
        tensor.neg()
        assert (Elsewhere.asked, LayoutElsewhere.asked) == asked
    shapes = [event.input_shapes for event in prof.events() if event.name == "aten::neg"]
    assert shapes == [[list(X.shape)]] * 2


def test_python_is_never_asked_for_sizes():
    """A subclass that computes its sizes in Python is not called by the recording: it has no shape there."""
    tensor = Elsewhere(X)
    with otp.profile(record_shapes=True) as prof:
        asked = Elsewhere.asked
        tensor.neg()
        assert Elsewhere.asked == asked
    shapes = {event.name: event.input_shapes for event in reversed(prof.events()) if event.name == "aten::neg"}
    assert shapes == {"aten::neg": [[]]}


class DeviceElsewhere(torch.Tensor):
    """A tensor whose device Python is asked for, which opens labels meanwhile."""

    labels, entered = 0, 0

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3), dispatch_device=True)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.prim.device.default:
            return torch.empty(1)
        for _ in range(cls.labels):
            with otp.record_function("inner"):
                cls.entered += 1
        return torch.device("cpu")


EVERYTHING = {"record_shapes": True, "with_stack": True, "profile_memory": True}


@pytest.mark.parametrize("labels", [3, 2_000])
def test_what_a_question_records_is_recorded_once(monkeypatch, labels):
    """Where torch asks Python for what is recorded of a tensor, what that records is there once, and inputs are whole."""
    tensor = DeviceElsewhere()
    torch.ops.aten.relu(tensor)
    monkeypatch.setattr(DeviceElsewhere, "labels", labels)
    monkeypatch.setattr(DeviceElsewhere, "entered", 0)
    with otp.profile(**EVERYTHING) as prof:
        for _ in range(20):
            torch.ops.aten.relu(tensor)
    names = [event.name for event in prof.events()]
    assert names.count("inner") == DeviceElsewhere.entered > 0
    shapes = [event.input_shapes for event in prof.events() if event.name == "aten::relu"]
    assert shapes == [[[2, 3]]] * 20


def test_inputs_of_fake_tensors_are_whole():
    """With storages too, the inputs of operators on fake tensors, whose device Python is asked for, are torch's."""

    def body():
        with FakeTensorMode():
            fake = torch.empty(3, 5)
            for _ in range(50):
                fake.t()

    body()
    with (
        torch.profiler.profile(**EVERYTHING) as theirs,
        otp.profile(**(EVERYTHING | {"profile_memory": False})) as plain,
    ):
        body()
    with otp.profile(**EVERYTHING) as ours:
        body()
    for prof in (theirs, plain, ours):
        shapes = [event.input_shapes for event in prof.events() if event.name == "aten::t"]
        assert shapes == [[[3, 5]]] * len(shapes)
        assert len(shapes) >= 50
