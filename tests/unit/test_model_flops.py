"""Operations counted from the words of inputs, for any inputs: the textbook's numbers where shapes fit, and never an error."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_torchprof._columns.batch import Batch
from otel_torchprof._model.flops import flops_of

SIZES = st.integers(1, 9)


def tensor(*shape):
    """The words of a contiguous tensor of floats."""
    return [1 | 7 << 8 | len(shape) << 32, *shape]


def integer(value):
    """The words of a whole number."""
    return [3, value]


def numbers(*values):
    """The words of a list of whole numbers."""
    return [7 | len(values) << 32, *(word for value in values for word in integer(value))]


def flag(value):
    """The word of a truth value."""
    return [5 | value << 32]


OTHER = [0]


def batch_of(*events, parents=None):
    """Events of one thread: a name and the words of each input."""
    names = ["", *dict.fromkeys(name for name, *_ in events)]
    words, offsets = [], []
    for _, *inputs in events:
        offsets.append(len(words))
        words += [len(inputs), *(word for one in inputs for word in one)]
    columns = {
        "start": range(len(events)),
        "end": [100 - i for i in range(len(events))],
        "name": [names.index(name) for name, *_ in events],
        "parent": parents or [-1] * len(events),
        "inputs": offsets,
    }
    return Batch.of(columns, names, inputs=np.array(words, dtype=np.int64))


def flops(name, *inputs):
    """Of one event."""
    return flops_of(batch_of((name, *inputs))).item(0)


@given(SIZES, SIZES, SIZES, SIZES)
def test_products_of_matrices(b, m, k, n):
    """Two operations for each element of the result and each of the inner dimension; what is added costs nothing."""
    assert flops("aten::mm", tensor(m, k), tensor(k, n)) == 2 * m * k * n
    assert flops("aten::addmm", tensor(n), tensor(m, k), tensor(k, n), integer(1), integer(1)) == 2 * m * k * n
    assert flops("aten::bmm", tensor(b, m, k), tensor(b, k, n)) == 2 * b * m * k * n
    assert flops("aten::baddbmm", tensor(n), tensor(b, m, k), tensor(b, k, n)) == 2 * b * m * k * n


@given(SIZES, SIZES, SIZES, SIZES)
def test_layers_of_an_lstm(steps, batch, width, state):
    """The products of four gates with input and state at each step, and two of each backwards."""
    inputs = tensor(steps, batch, width), tensor(4 * state, width), tensor(4 * state, state), OTHER
    forward = 2 * steps * batch * 4 * state * (width + state)
    assert flops("aten::mkldnn_rnn_layer", *inputs) == forward
    assert flops("aten::mkldnn_rnn_layer_backward", *inputs) == 2 * forward


@given(st.lists(SIZES, max_size=5))
def test_elementwise(shape):
    """One for each element of the first input; an addition of numbers is none."""
    assert flops("aten::add", tensor(*shape), tensor(3)) == prod(shape)
    assert flops("aten::mul", tensor(*shape), OTHER) == prod(shape)
    assert flops("aten::mul", integer(3), tensor(*shape)) == 0


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_convolutions_count_every_product(data, dims, groups, channels, features):
    """In every number of dimensions: positions of the kernel, found by trying, times the elements of the weight."""
    kernel, stride, dilation, padding = (
        data.draw(st.lists(st.integers(low, 3), min_size=dims, max_size=dims)) for low in (1, 1, 1, 0)
    )
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sizes = [r + data.draw(st.integers(0, 6)) for r in reach]
    each = zip(sizes, padding, reach, stride, strict=True)
    positions = prod(len(range(-p, size + p - r + 1, s)) for size, p, r, s in each)
    weight = (features * groups, channels, *kernel)
    expected = 2 * 5 * positions * prod(weight)
    inputs = tensor(5, channels * groups, *sizes), tensor(*weight), OTHER
    rest = numbers(*stride), numbers(*padding), numbers(*dilation)
    assert flops(f"aten::conv{dims}d", *inputs, *rest, integer(groups)) == expected
    transposed = *rest, flag(0), numbers(*[0] * dims), integer(groups)
    assert flops("aten::convolution", *inputs, *transposed) == expected


def test_transposed_convolutions():
    """The kernel runs over the input."""
    inputs = tensor(2, 4, 5, 6), tensor(4, 3, 2, 2), OTHER
    assert flops("aten::conv_transpose2d", *inputs, numbers(2, 2)) == 2 * 2 * 30 * 48
    rest = numbers(2, 2), numbers(0, 0), numbers(1, 1), flag(1), numbers(0, 0), integer(1)
    assert flops("aten::convolution", *inputs, *rest) == 2 * 2 * 30 * 48


@pytest.mark.parametrize(("mask", "passes"), [((1, 1, 1), 2), ((1, 0, 0), 1), ((0, 1, 1), 1), ((0, 0, 1), 0)])
def test_backward_of_a_convolution(mask, passes):
    """As many operations as forwards for each gradient that is wanted; that of the bias is none."""
    sizes = tensor(2, 3, 4, 4), tensor(2, 5, 6, 6), tensor(3, 5, 3, 3)
    rest = numbers(3), numbers(1, 1), numbers(0, 0), numbers(1, 1), flag(0), numbers(0, 0), integer(1)
    requested = [7 | 3 << 32, *(word for bit in mask for word in flag(bit))]
    assert flops("aten::convolution_backward", *sizes, *rest, requested) == passes * 2 * 2 * 16 * prod((3, 5, 3, 3))


@given(st.tuples(*[SIZES] * 6))
def test_attention(sizes):
    """Both products, forwards; five of them backwards."""
    b, h, q, k, width, value_width = sizes
    inputs = tensor(b, h, q, width), tensor(b, h, k, width), tensor(b, h, k, value_width)
    scores = 2 * b * h * q * k
    assert flops("aten::scaled_dot_product_attention", *inputs) == scores * (width + value_width)
    backward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert flops(backward, tensor(b, h, q, value_width), *inputs) == scores * (3 * width + 2 * value_width)


WORDS = st.lists(
    st.lists(st.integers(-2, 2**40), max_size=5).map(lambda shape: tensor(*shape))
    | st.integers(-3, 3).map(integer)
    | st.lists(st.integers(-3, 3), max_size=3).map(lambda values: numbers(*values))
    | st.booleans().map(flag)
    | st.just(OTHER),
    max_size=11,
)
NAMES = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mul", "aten::conv1d", "aten::conv2d")
MORE = (
    "aten::convolution",
    "aten::convolution_backward",
    "aten::conv_transpose3d",
    "aten::scaled_dot_product_attention",
)


@given(st.sampled_from((*NAMES, *MORE)), WORDS)
def test_inputs_that_make_no_sense_are_no_error(name, inputs):
    """Whatever the inputs are, there is a number, of 64 bits."""
    assert 0 <= flops(name, *inputs) < 1 << 64


CONV = tensor(1, 2, 5), tensor(3, 2, 3), OTHER, numbers(1), numbers(0), numbers(1)
CONV1D = ("aten::conv1d", *CONV, integer(1))
INNER = ("aten::convolution", *CONV, flag(0), numbers(0), integer(1))
Q = tensor(2, 3, 4, 8)
SDPA = ("aten::scaled_dot_product_attention", Q, Q, Q)
BMM = ("aten::bmm", tensor(6, 4, 8), tensor(6, 8, 4))
MUL = ("aten::mul", Q)


@pytest.mark.parametrize(
    ("events", "parents", "expected"),
    [
        ((CONV1D, INNER, INNER), [-1, 0, 1], [108, 0, 0]),
        ((("label",), INNER, CONV1D), [-1, 0, 0], [0, 108, 108]),
        ((SDPA, MUL, BMM, BMM), [-1, 0, 0, 0], [0, 192, 1536, 1536]),
        ((SDPA, MUL), [-1, 0], [3072, 192]),
        ((BMM, ("f",), INNER), [-1, 0, 1], [1536, 0, 0]),
        ((MUL, INNER), [-1, 0], [192, 108]),
        ((CONV1D, SDPA, BMM), [-1, 0, 1], [0, 0, 1536]),
    ],
)
def test_nothing_is_counted_twice(events, parents, expected):
    """Beyond torch's own numbers the outermost counts, unless torch counts a product inside of it or around it."""
    assert flops_of(batch_of(*events, parents=parents)).tolist() == expected


def test_events_without_inputs_have_none():
    """Without recorded inputs there is nothing to count."""
    batch = Batch.of({"start": [1], "end": [2], "name": [1]}, ["", "aten::mm"])
    assert flops_of(batch).tolist() == [0]
    batch = Batch.of(
        {"start": [1], "end": [2], "name": [1], "inputs": [-1]}, ["", "aten::mm"], inputs=np.zeros(0, np.int64)
    )
    assert flops_of(batch).tolist() == [0]
    empty = Batch.of({"start": [], "end": [], "inputs": []}, [""], inputs=np.zeros(0, np.int64))
    assert flops_of(empty).tolist() == []
