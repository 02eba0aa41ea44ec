"""Operations counted as torch's profiler counts them, and what it leaves out as ``torch.utils.flop_counter`` does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from hypothesis import assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from observed import run, torchs  # noqa: E402
from torch._C._profiler import _RecordFunctionFast  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from otel_torchprof._model.flops import flops_of  # noqa: E402
from otel_torchprof._profile.events import EventList  # noqa: E402
from otel_torchprof._record.recording import ProfileSegment  # noqa: E402
from otel_torchprof._record.source import RecordingOptions  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of each operator that it cannot count
F = torch.nn.functional
TORCHS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mul", "aten::add", "aten::conv2d")


def ours_of(body):
    """The body under a recording with inputs."""
    recording = ProfileSegment(RecordingOptions(operators=True, inputs=True))
    recording.start()
    body()
    recording.stop()
    return recording.batch()


def both(body):
    """Name and operations of every event that torch can count, by ours and by torch's profiler."""
    with torchs(with_flops=True) as theirs:
        batch = ours_of(lambda: run(body))
    ours = EventList.of(batch, origin_ns=0, with_flops=True)
    return tuple([(e.name, e.flops) for e in events if e.name in TORCHS] for events in (ours, theirs.events()))


SHAPE = st.lists(st.integers(0, 5), max_size=5)
PAIR = st.lists(st.integers(-2, 4), min_size=2, max_size=2)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TORCHS[:6]), st.lists(SHAPE.map(torch.ones) | st.integers(-2, 3), max_size=4))
def test_any_inputs_as_torch(name, inputs):
    """Whatever a matrix product or an elementwise operator is given, also what it would refuse: torch's number."""

    def body():
        with _RecordFunctionFast(name, inputs):
            pass

    ours, theirs = both(body)
    assert ours == theirs
    assert len(ours) == 1


@settings(max_examples=60, deadline=None)
@given(SHAPE, SHAPE, st.tuples(PAIR, PAIR | st.none(), PAIR, st.integers(-1, 3)))
def test_any_convolution_as_torch(image, weight, rest):
    """Strides, paddings, dilations and groups of every kind, kernels larger than the image, no images: torch's number.

    An image that is no batch, which torch does not count, is one of the convolutions beyond torch.
    """
    assume(len(image) != len(weight) - 1)

    def body():
        with _RecordFunctionFast("aten::conv2d", [torch.ones(image), torch.ones(weight), None, *rest]):
            pass

    ours, theirs = both(body)
    assert ours == theirs


def convolutions():
    """Those that torch counts, forwards and backwards."""
    image = torch.ones(2, 4, 9, 8, requires_grad=True)
    for weight, options in (
        ((6, 4, 3, 3), {}),
        ((6, 2, 3, 2), {"groups": 2, "stride": 2, "padding": (1, 0)}),
        ((4, 1, 3, 3), {"groups": 4, "dilation": 2}),
    ):
        F.conv2d(image, torch.ones(weight, requires_grad=True), **options).sum().backward()


def network():
    """Layers with products of matrices and sums."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    loss = (model(torch.ones(5, 8)) * 2 + 1).sum()
    loss.backward()
    torch.einsum("bij,bjk->bik", torch.ones(3, 4, 5), torch.ones(3, 5, 6))


def attention():
    """The kind whose products torch can see."""
    q = torch.ones(2, 3, 4, 8, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


@pytest.mark.parametrize("body", [convolutions, network, attention])
def test_programs_as_torch(body):
    """Every operator that torch counts has torch's number, event for event."""
    ours, theirs = both(body)
    assert ours == theirs
    assert sum(count for _, count in ours) > 0


def conv_all():
    """Convolutions of one to three dimensions, transposed, without a batch, padded to the same size."""
    F.conv1d(torch.ones(2, 4, 9), torch.ones(6, 4, 3), padding=1)
    F.conv2d(torch.ones(2, 4, 9, 9), torch.ones(6, 4, 3, 3), stride=2)
    F.conv3d(torch.ones(2, 4, 5, 5, 5), torch.ones(6, 4, 3, 3, 3))
    F.conv2d(torch.ones(2, 4, 9, 9), torch.ones(6, 4, 3, 3), padding="same")
    F.conv2d(torch.ones(4, 9, 9), torch.ones(6, 4, 3, 3))
    F.conv_transpose2d(torch.ones(2, 4, 5, 5), torch.ones(4, 6, 3, 3), stride=2)


def conv_backward():
    """The gradients of a convolution, one of them or both."""
    x, weight = torch.ones(2, 4, 9, requires_grad=True), torch.ones(6, 4, 3, requires_grad=True)
    F.conv1d(x, weight).sum().backward()
    F.conv1d(x.detach(), weight).sum().backward()
    F.conv_transpose1d(x, torch.ones(4, 6, 3, requires_grad=True), stride=2).sum().backward()


def products():
    """Products of matrices alone."""
    torch.ones(3, 4) @ torch.ones(4, 5)
    torch.addmm(torch.ones(5), torch.ones(3, 4), torch.ones(4, 5))
    torch.baddbmm(torch.ones(2, 3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5))


@pytest.mark.parametrize("body", [conv_all, conv_backward, products])
def test_sums_are_those_of_torchs_flop_counter(body):
    """Nothing is left out and nothing counted twice: the sum over all events is the one of torch's other counter."""
    with FlopCounterMode(display=False) as counter:
        body()
    assert int(flops_of(ours_of(body)).sum()) == counter.get_total_flops() > 0


def test_attention_is_counted_once():
    """Fused attention counts both of its products on the outermost event, and five backwards."""
    q = torch.ones(2, 3, 4, 8, requires_grad=True)
    batch = ours_of(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward())
    flops = flops_of(batch)
    found = {batch.names[name]: count for name, count in zip(batch["name"], flops.tolist(), strict=True) if count}
    scores = 2 * 2 * 3 * 4 * 4
    [outer] = [name for name in found if not name.endswith("_backward") and "attention" in name]
    assert (outer, found[outer]) == ("aten::scaled_dot_product_attention", scores * 16)
    assert [count for name, count in found.items() if name.endswith("attention_for_cpu_backward")] == [scores * 40]


def test_without_flops_there_are_none():
    """Events have 0, as torch's, unless operations are asked for."""
    batch = ours_of(network)
    assert {event.flops for event in EventList.of(batch, origin_ns=0)} == {0}
    assert {event.flops for event in EventList.of(batch, origin_ns=0, with_flops=True)} != {0}
