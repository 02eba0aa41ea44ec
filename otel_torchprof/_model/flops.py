"""Computes floating-point operations of events from their names and inputs, on request.

For the operators that torch's profiler counts (``with_flops=True``: ``aten::mm``, ``addmm``, ``bmm``, ``baddbmm``, ``mul``,
``add``, ``conv2d``) the numbers are torch's, its conventions included: a multiplication and an addition are two operations,
biases and scaling factors do not count, elementwise operators count their first input, and counts are modulo 2**64.

In addition to torch: convolutions of other dimensions, transposed ones and ones with padding as text, attention, LSTM layers of
oneDNN, and the backward passes of these. Of nested ones only the top-level event counts, and only if no matrix product or convolution that torch counts is
inside it or encloses it, so that sums over events are right.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otel_torchprof._columns.schema import INPUTS

from .frames import distinct
from .inputs import Input, InputKind, InputPart, decoded, has_inputs, numbered
from .reductions import weights_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from otel_torchprof._columns.batch import Batch

Array = npt.NDArray[Any]

_WRAP = 1 << 64


class _NotCountable(Exception):  # noqa: N818 - not an error, a result
    """The inputs are not of the kind that the formula is for."""


# ---- Reading inputs ----


def _shape(inputs: Sequence[Input], index: int, dims: int | None = None) -> list[int]:
    if index >= len(inputs) or inputs[index].kind is not InputKind.TENSOR:
        raise _NotCountable
    shape = inputs[index].shape
    if dims is not None and len(shape) != dims:
        raise _NotCountable
    return shape


def _numbers(inputs: Sequence[Input], index: int, count: int) -> list[int]:
    """A list of integers; a single one is repeated for all dimensions."""
    if index >= len(inputs):
        raise _NotCountable
    numbers = [element.value for element in inputs[index].elements if element.kind is InputKind.INT]
    if len(numbers) == 1:
        numbers *= count
    if len(numbers) != count:
        raise _NotCountable
    return numbers


def _integer(inputs: Sequence[Input], index: int) -> int:
    if index >= len(inputs) or inputs[index].kind is not InputKind.INT:
        raise _NotCountable
    value: int = inputs[index].value
    return value


def _flag(inputs: Sequence[Input], index: int) -> bool:
    return index < len(inputs) and inputs[index].kind is InputKind.BOOL and bool(inputs[index].value)


# ---- Operators that torch counts ----


def _elementwise(inputs: Sequence[Input]) -> int:
    """One operation per element of the first input, as torch counts; ignores broadcasting."""
    return prod(_shape(inputs, 0))


def _product(first: list[int], second: list[int], batch: int = 1) -> int:
    """2 * M * K * N of an (M, K) and a (K, N) matrix: K multiplications and K additions per element of the result.

    Golub, Van Loan: Matrix Computations, 4th ed., 1.1.15. Shapes that do not fit together are multiplied out as torch does:
    all sizes of both, without the inner and the batch dimension of the first.
    """
    if not first or first[-1] == 0 or batch == 0:
        return 0
    return prod(first) % _WRAP // first[-1] // batch * prod(second) * 2


def _mm(inputs: Sequence[Input]) -> int:
    """Inputs: (M, K), (K, N)."""
    return _product(_shape(inputs, 0), _shape(inputs, 1))


def _addmm(inputs: Sequence[Input]) -> int:
    """Inputs: summand, (M, K), (K, N). The addition is not counted."""
    _shape(inputs, 0)
    return _product(_shape(inputs, 1), _shape(inputs, 2))


def _batched(first: list[int], second: list[int]) -> int:
    return _product(first, second, first[0]) if first else 0


def _bmm(inputs: Sequence[Input]) -> int:
    """Inputs: (B, M, K), (B, K, N); 2 * B * M * K * N."""
    return _batched(_shape(inputs, 0), _shape(inputs, 1))


def _baddbmm(inputs: Sequence[Input]) -> int:
    """Inputs: summand, (B, M, K), (B, K, N). The addition is not counted."""
    _shape(inputs, 0)
    return _batched(_shape(inputs, 1), _shape(inputs, 2))


def _towards_zero(numerator: int, denominator: int) -> int:
    """Division as C++ has it."""
    quotient = abs(numerator) // abs(denominator)
    return quotient if (numerator < 0) == (denominator < 0) else -quotient


def _outputs(sizes: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> int:
    """Positions of the kernel: (size + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1 in every dimension.

    Dumoulin, Visin: A guide to convolution arithmetic for deep learning (arXiv 1603.07285), relationship 14.
    """
    if 0 in stride:
        raise _NotCountable
    dimensions = zip(sizes, kernel, stride, padding, dilation, strict=True)
    return prod(_towards_zero(size + 2 * p - d * (k - 1) - 1, s) + 1 for size, k, s, p, d in dimensions)


def _torchs_conv2d(inputs: Sequence[Input]) -> int:
    """2 * N * OH * OW * KH * KW * C_in * C_out / groups, of batches of images with a padding in numbers."""
    batch, channels, *sizes = _shape(inputs, 0, 4)
    features, _, *kernel = _shape(inputs, 1, 4)
    stride, padding, dilation = (_numbers(inputs, index, 2) for index in (3, 4, 5))
    groups = _integer(inputs, 6)
    if groups == 0:
        return 0
    count = 2 * batch * _outputs(sizes, kernel, stride, padding, dilation) * prod(kernel) * channels * features
    return count % _WRAP // (groups % _WRAP)


# ---- Operators that torch does not count ----


def _split(inputs: Sequence[Input], index: int) -> tuple[int, list[int], list[int]]:
    """Batch size, sizes in space and shape of the weight; an input without a batch dimension is a batch of one."""
    weight = _shape(inputs, index + 1)
    shape = _shape(inputs, index)
    if len(weight) < 3:  # noqa: PLR2004 - two dimensions of channels, at least one spatial
        raise _NotCountable
    if len(shape) == len(weight) - 1:
        shape = [1, *shape]
    if len(shape) != len(weight):
        raise _NotCountable
    return shape[0], shape[2:], weight


def _forward(inputs: Sequence[Input], places: tuple[int, int, int]) -> int:
    """2 * N * positions * elements of the weight, which are C_out * C_in / groups * kernel.

    The count of :func:`_torchs_conv2d` in any number of dimensions. ``places``: of stride, padding and dilation.
    """
    batch, sizes, weight = _split(inputs, 0)
    stride, padding, dilation = (_numbers(inputs, place, len(sizes)) for place in places)
    return max(0, 2 * batch * _outputs(sizes, weight[2:], stride, padding, dilation) * prod(weight))


def _transposed(inputs: Sequence[Input]) -> int:
    """2 * N * positions of the input * elements of the weight: a transposed convolution runs its kernel over its input.

    Dumoulin, Visin, chapter 4.
    """
    batch, sizes, weight = _split(inputs, 0)
    return 2 * batch * prod(sizes) * prod(weight)


def _conv(inputs: Sequence[Input]) -> int:
    """Inputs: input, weight, bias, stride, padding, dilation, groups."""
    return _forward(inputs, (3, 4, 5))


def _convolution(inputs: Sequence[Input]) -> int:
    """Inputs: input, weight, bias, stride, padding, dilation, transposed, output padding, groups."""
    return _transposed(inputs) if _flag(inputs, 6) else _forward(inputs, (3, 4, 5))


def _convolution_backward(inputs: Sequence[Input]) -> int:
    """The count of the forward pass for each requested gradient (of input and weight).

    Every product of the forward pass has one in either gradient (``torch.utils.flop_counter`` counts so too, without groups).
    Inputs: gradient, input, weight, sizes of the bias, stride, padding, dilation, transposed, output padding, groups, mask.
    """
    batch, sizes, weight = _split(inputs, 1)
    outputs = _shape(inputs, 0)[2:]
    requested = inputs[10].elements[:2] if len(inputs) > 10 else []  # noqa: PLR2004 - the mask's place
    passes = sum(bool(element.value) for element in requested)
    return passes * 2 * batch * prod(sizes if _flag(inputs, 7) else outputs) * prod(weight)


def _attention_sizes(inputs: Sequence[Input], index: int) -> tuple[int, int, int]:
    """L * S of all heads, and the widths of keys and values; queries may have more heads than keys."""
    query, key, value = (_shape(inputs, index + i) for i in range(3))
    if min(len(query), len(key), len(value)) < 2:  # noqa: PLR2004 - matrices
        raise _NotCountable
    return prod(query[:-1]) * key[-2], query[-1], value[-1]


def _attention(inputs: Sequence[Input]) -> int:
    """2 * B * H * L * S * (E + E_v): the products Q K^T and P V; a causal mask is not taken off.

    Vaswani et al., Attention is all you need (arXiv 1706.03762), equation 1; the convention of
    ``torch.utils.flop_counter``. Inputs: (B, H, L, E), (B, H, S, E), (B, H, S, E_v).
    """
    scores, width, value_width = _attention_sizes(inputs, 0)
    return 2 * scores * (width + value_width)


def _attention_backward(inputs: Sequence[Input]) -> int:
    """2 * B * H * L * S * (3 E + 2 E_v): Q K^T once more, and the products for dV, dP, dQ and dK.

    Dao et al., FlashAttention (arXiv 2205.14135), algorithm 4. Inputs: gradient, query, key, value.
    """
    scores, width, value_width = _attention_sizes(inputs, 1)
    return 2 * scores * (3 * width + 2 * value_width)


def _recurrent(inputs: Sequence[Input]) -> int:
    """2 * steps * N * elements of the weights of input and state: a layer's products, for all gates together.

    Hochreiter, Schmidhuber: Long short-term memory (Neural Computation 9, 1997). Inputs: (steps, N, width), both weights.
    """
    steps, batch, _ = _shape(inputs, 0, 3)
    return 2 * steps * batch * (prod(_shape(inputs, 1, 2)) + prod(_shape(inputs, 2, 2)))


def _recurrent_backward(inputs: Sequence[Input]) -> int:
    """Each product of the forward pass has one for its input and one for its weight. Inputs: those of the forward pass first."""
    return 2 * _recurrent(inputs)


_TORCHS: dict[str, Callable[[Sequence[Input]], int]] = {
    "aten::add": _elementwise,
    "aten::mul": _elementwise,
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::bmm": _bmm,
    "aten::baddbmm": _baddbmm,
    "aten::conv2d": _torchs_conv2d,
}
_ELEMENTWISE = frozenset(("aten::add", "aten::mul"))

_SDPA = "aten::_scaled_dot_product_"
_FUSED = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
    "fused_attention_overrideable",
)

_BEYOND: dict[str, Callable[[Sequence[Input]], int]] = {
    **{f"aten::conv{dims}d": _conv for dims in (1, 2, 3)},
    **{f"aten::conv_transpose{dims}d": _transposed for dims in (1, 2, 3)},
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _recurrent_backward,
    "aten::scaled_dot_product_attention": _attention,
    **{f"{_SDPA}{kind}": _attention for kind in _FUSED},
    **{f"{_SDPA}{kind}_backward": _attention_backward for kind in _FUSED},
}


def _counted(formula: Callable[[Sequence[Input]], int] | None, inputs: Sequence[Input]) -> int:
    try:
        return 0 if formula is None else formula(inputs) % _WRAP
    except _NotCountable:
        return 0


def flops_of(batch: Batch) -> npt.NDArray[np.uint64]:
    """Returns floating-point operations per row; 0 for operators without a formula or recorded inputs.

    For events that stand for several calls, whose inputs may differ, those that their file says.
    Costs some 50 ns per event of an operator with a formula, some microseconds per distinct inputs, and a few ns per other event.
    """
    weights, flops = weights_of(batch), _by_inputs(batch)
    if weights is None:
        return flops
    return np.where(weights.flops >= 0, weights.flops.astype(np.uint64), flops * weights.calls.astype(np.uint64))


def group_flops(batch: Batch, group: npt.NDArray[np.int64], groups: int) -> npt.NDArray[np.float64]:
    """Floating-point operations of matrix products, convolutions and attention per group of rows, as a model's FLOPs are counted.

    ``group``: of each row, -1 for none. Costs what :func:`flops_of` does.
    """
    counted, elementwise = flops_of(batch), batch.names.matching(tuple(_ELEMENTWISE))
    rows = np.flatnonzero((counted != 0) & (group >= 0))
    rows = rows if elementwise is None else rows[~elementwise[batch["name"][rows]]]
    sums = np.zeros(groups)
    np.add.at(sums, group[rows], counted[rows])
    return sums


def _by_inputs(batch: Batch) -> npt.NDArray[np.uint64]:
    """The same, each row being one call."""
    flops = np.zeros(len(batch), dtype=np.uint64)
    if not has_inputs(batch):
        return flops
    used, which = distinct(batch["name"])
    texts = [batch.names[name] for name in used.tolist()]
    sorts = np.array(
        [1 if text in _ELEMENTWISE else 2 if text in _TORCHS or text in _BEYOND else 0 for text in texts],
        dtype=np.uint8,
    )[which]
    rows = np.flatnonzero((sorts != 0) & (batch[INPUTS.name] >= 0))
    numbers, first = numbered(batch, InputPart.SHAPES | InputPart.VALUES, names=batch["name"][rows], rows=rows)
    torchs, beyond = (np.array(column, dtype=np.uint64) for column in _columns(batch, first.tolist()))
    flops[rows] = torchs[numbers]
    more = rows[beyond[numbers] != 0]
    if len(more):
        solid = np.zeros(len(batch), dtype=bool)
        solid[rows] = (torchs[numbers] != 0) & (sorts[rows] == 2)  # noqa: PLR2004 - neither addition nor multiplication
        chosen = _top_level(batch["parent"], more, solid)
        extra = np.zeros(len(batch), dtype=np.uint64)
        extra[rows] = beyond[numbers]
        flops[chosen] = extra[chosen]
    return flops


def _columns(batch: Batch, rows: list[int]) -> tuple[list[int], list[int]]:
    """Torch's count for each row, and this package's own where torch counts nothing."""
    torchs, beyond = list[int](), list[int]()
    for row in rows:
        name, inputs = batch.names[batch["name"].item(row)], decoded(batch, row).inputs
        torchs.append(_counted(_TORCHS.get(name), inputs))
        beyond.append(0 if torchs[-1] else _counted(_BEYOND.get(name), inputs))
    return torchs, beyond


def _top_level(parent: Array, candidates: Array, solid: Array) -> Array:
    """The candidates that lie in no other candidate, and neither in nor around a row that is ``solid``."""
    enclosing = np.zeros(len(parent), dtype=bool)
    rows = parent[np.flatnonzero(solid)]
    while len(rows := rows[rows >= 0]):
        rows = rows[~enclosing[rows]]
        enclosing[rows] = True
        rows = parent[rows]
    candidates = candidates[~enclosing[candidates]]
    taken = solid.copy()
    taken[candidates] = True
    free = np.ones(len(candidates), dtype=bool)
    which = np.arange(len(candidates))
    rows = parent[candidates]
    while len(which := which[rows >= 0]):
        rows = rows[rows >= 0]
        inside = taken[rows]
        free[which[inside]] = False
        which, rows = which[~inside], parent[rows[~inside]]
    chosen: Array = candidates[free]
    return chosen
