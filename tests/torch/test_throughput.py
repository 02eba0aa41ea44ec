"""Tokens and samples of steps: counted from the batches of data loaders, or said by the program."""

from __future__ import annotations

import collections
import threading

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import Collecting  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._native.python_sources import usage_now  # noqa: E402

TOKENS, SAMPLES, FLOPS = "torch.step.tokens", "torch.step.samples", "torch.step.flops"
SIZE, LENGTH, BATCHES = 4, 10, 6


class Mapping(collections.UserDict):
    """As transformers' BatchEncoding."""


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return SIZE * BATCHES

    def __getitem__(self, at):
        return {"label": torch.tensor(1.0), "input_ids": torch.full((LENGTH,), at)}


def in_user_dict(samples):
    return Mapping(torch.utils.data.default_collate(samples))


def loaders():
    pairs = torch.utils.data.TensorDataset(torch.ones(SIZE * BATCHES, 3), torch.ones(SIZE * BATCHES))
    loader = torch.utils.data.DataLoader
    whole = [torch.ones(SIZE, 3)] * BATCHES
    packed = [{"input_ids": torch.ones(7, dtype=torch.int64)}] * BATCHES
    return {
        "pairs": (loader(pairs, batch_size=SIZE), None, SIZE),
        "dictionaries": (loader(Texts(), batch_size=SIZE), SIZE * LENGTH, SIZE),
        "UserDict": (loader(Texts(), batch_size=SIZE, collate_fn=in_user_dict), SIZE * LENGTH, SIZE),
        "workers": (loader(Texts(), batch_size=SIZE, num_workers=1), SIZE * LENGTH, SIZE),
        "unbatched": (loader(whole, batch_size=None), None, None),
        "packed": (loader(packed, batch_size=None), 7, 1),
        "texts": (loader(["a", "b"] * BATCHES, batch_size=2), None, None),
    }


def trained(loader, exporter, detail="steps"):
    """The attributes of the steps of a loop that nothing marks, over two epochs."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with otp.stream(exporter, detail=detail):
        for _ in range(2):
            for _ in loader:
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [span.attributes for span in exporter.spans if span.name == "torch.step"]


@pytest.mark.parametrize("kind", ["pairs", "dictionaries", "UserDict", "workers", "unbatched", "packed", "texts"])
def test_batches_are_counted(kind):
    """A step that is learned has the tokens and samples of its batch, by the shapes of what the loader returned."""
    loader, tokens, samples = loaders()[kind]
    steps = trained(loader, Collecting())
    assert len(steps) >= 2 * BATCHES - 2
    # Each from the request of its batch on; the one after which the loader had no more is cut there.
    assert [(step.get(TOKENS), step.get(SAMPLES)) for step in steps[1:-1]].count((tokens, samples)) >= len(steps) - 4


def test_the_program_says_it():
    """What ``step()`` is given is on its step, and not what loaders returned; the metrics count it."""
    exporter = Collecting()
    with otp.stream(exporter, detail="steps") as stream:
        stream.step()
        for _ in loaders()["pairs"][0]:
            stream.step({"torch.step.loss": 1.5}, tokens=1000, samples=2)
    found = [span.attributes for span in exporter.spans if TOKENS in span.attributes]
    assert [(step[TOKENS], step[SAMPLES], step["torch.step.loss"]) for step in found] == [(1000, 2, 1.5)] * BATCHES


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (1.5, TypeError),
        (True, TypeError),
        (-1, ValueError),
        (2**63, ValueError),
        ("7", TypeError),
        (torch.ones(1), TypeError),
    ],
)
def test_what_is_no_count(given, error):
    """A number of tokens that is none is refused by name, and ends no step."""
    exporter = Collecting()
    with otp.stream(exporter, detail="steps") as stream:
        stream.step()
        with pytest.raises(error, match="tokens is"):
            stream.step(tokens=given)
        stream.step(tokens=3)
    assert [span.attributes[TOKENS] for span in exporter.spans if TOKENS in span.attributes] == [3]


def of_linear():
    """2 * N * in * out forwards, once more for the weight's gradient, not for that of the input, which needs none."""
    return torch.nn.Linear(30, 50), torch.ones(20, 30), 2 * 20 * 30 * 50 * 2


def of_lstm():
    """Two layers of four gates; oneDNN computes all gradients."""
    gates = [4 * 16 * (8 + 16), 4 * 16 * (16 + 16)]
    return torch.nn.LSTM(8, 16, 2), torch.ones(5, 3, 8), 2 * 5 * 3 * sum(gates) * 3


def of_convolution():
    """2 * N * positions * out * in / groups * kernel; and for the weight."""
    return torch.nn.Conv2d(4, 6, 3, groups=2), torch.ones(2, 4, 10, 12), 2 * 2 * 8 * 10 * 6 * 2 * 9 * 2


def of_attention():
    """Projections and products of two heads, with all gradients but that of the input."""
    rows, width, heads, length = 2 * 7, 16, 2, 7
    scores, each = 2 * heads * length * length, width // heads
    linear, out = 2 * rows * width * 3 * width, 2 * rows * width * width
    return (
        torch.nn.TransformerEncoderLayer(width, heads, 8, batch_first=True).self_attn,
        torch.ones(2, length, width),
        2 * linear + 3 * out + 2 * scores * (2 + 4) * each,
    )


@pytest.mark.parametrize("model", [of_linear, of_convolution, of_lstm, of_attention])
def test_operations_of_a_step(model):
    """A step whose operators were recorded with shapes has the operations that one counts by hand, a step without has none."""
    module, given, expected = model()
    inputs = (given, given, given) if model is of_attention else (given,)
    exporter = Collecting()
    with otp.stream(exporter, detail="ops", record_shapes=True) as stream:
        for _ in range(3):
            found = module(*inputs)
            (found[0] if isinstance(found, tuple) else found).sum().backward()
            stream.step()
    counted = [span.attributes.get(FLOPS) for span in exporter.spans if span.name == "torch.step"]
    if model is of_lstm and "aten::mkldnn_rnn_layer" not in {span.name for span in exporter.spans}:
        pytest.skip("this torch computes an LSTM without oneDNN")
    assert counted[:3] == [expected] * 3


@pytest.mark.parametrize("exporter", [otp.ChromeTraceExporter, otp.OTLPFileExporter])
def test_operations_in_files(exporter, tmp_path):
    """A file of a recording with shapes has the operations of each call and each module, and together those of its steps."""
    path, (module, given, expected) = tmp_path / "trace.json", of_linear()
    with otp.stream(exporter(path), detail="ops", record_shapes=True) as stream:
        for _ in range(3):
            module(given).mm(torch.ones(50, 1)).backward(torch.ones(20, 1))
            stream.step()
    loaded, beside = otp.load(path), 3 * (2 * 20 * 50) * 2
    assert loaded.with_flops
    assert sum(average.flops or 0 for average in loaded.key_averages()) == 3 * expected + beside
    by_module = {average.key: average.flops for average in loaded.key_averages(group_by_module=True)}
    assert (by_module["Linear"], by_module["Linear (backward)"]) == (3 * expected / 2, 3 * expected / 2)


class Watched(dict):
    """Says if its own code runs."""

    ran = False

    def __getitem__(self, key):
        Watched.ran = True
        return super().__getitem__(key)

    items = values = __iter__ = __getattribute__ = __getitem__


def test_no_code_of_the_program_runs():
    """Batches are counted without a call of what a program has written, and whatever they are."""
    endless = []
    endless.append(endless)
    odd = [Watched(input_ids=torch.ones(2, 5)), endless, object, 3, None, {"input_ids": None, 1: (torch.ones(()),)}]
    before = usage_now()[10:]
    with otp.stream(Collecting(), detail="steps"):
        for _ in torch.utils.data.DataLoader(odd, batch_size=None, collate_fn=lambda batch: batch):
            pass
    assert not Watched.ran
    assert [after - earlier for after, earlier in zip(usage_now()[10:], before, strict=True)] == [10, 2]


def test_batches_of_other_threads_are_not_counted():
    """What another thread takes from a loader is no part of the loop's steps, as nobody knows which step uses it."""
    exporter, mine, others = Collecting(), loaders()["dictionaries"][0], loaders()["dictionaries"][0]

    def read():
        for _ in others:
            pass

    with otp.stream(exporter, detail="steps") as stream:
        stream.step()
        for _ in mine:
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
            stream.step()
    found = [span.attributes[TOKENS] for span in exporter.spans if TOKENS in span.attributes]
    assert found == [SIZE * LENGTH] * BATCHES
