"""Labels beside torch's own: arguments, futures, scripts, and modes that catch every call of torch's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from observed import torchs  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import otel_torchprof as otp  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of what is deprecated
X = torch.ones(3)


def info(event):
    """What an event of a label tells."""
    names = ("name", "input_shapes", "input_dtypes", "concrete_inputs", "kwinputs", "scope", "node_id", "is_async")
    return [getattr(event, name) for name in (*names, "is_user_annotation", "activity_type", "overload_name")]


@pytest.mark.parametrize("args", [None, "", "text"])
@pytest.mark.parametrize("shapes", [False, True])
def test_events_of_labels_are_as_torchs(args, shapes):
    """With arguments and without, with shapes and without: what the event tells is the same."""
    with torchs(shapes=shapes) as theirs, torch.profiler.record_function("label", args):
        X.neg()
    with otp.profile(record_shapes=shapes) as ours, otp.record_function("label", args):
        X.neg()
    [mine] = [event for event in ours.events() if event.name == "label"]
    [other] = [event for event in theirs.events() if event.name == "label"]
    assert info(mine) == info(other)


def test_torchs_own_label_keeps_its_arguments():
    """Torch's record_function under our profile: its arguments are kept as those of ours."""
    from otel_torchprof._model.inputs import InputKind, text_ids

    with otp.profile(record_shapes=True) as prof, torch.profiler.record_function("label", "torch's text"):
        pass
    batch = prof._batch()
    assert [batch.names[text] for text in text_ids(batch, InputKind.STRING) if text] == ["torch's text"]


@pytest.mark.parametrize("kind", ["torch.futures", "fork"])
def test_a_label_ends_with_torchs_future(kind):
    """A future of torch's, done elsewhere or by TorchScript: the label ends with it, and the value comes through."""
    with otp.profile() as prof:
        future = torch.futures.Future() if kind == "torch.futures" else torch.jit.fork(torch.neg, X)
        label = otp.record_function("call")
        with label:
            after = label._call_end_callbacks_on_future(future)
        if kind == "torch.futures":
            assert label.is_open()
            future.set_result(X)
        assert after.wait().shape == X.shape
        assert not label.is_open()
        with pytest.raises(RuntimeError, match="can only be called once"):
            label._call_end_callbacks_on_future(future)
    assert [event.name for event in prof.events()].count("call") == 1


def test_errors_of_torchs_futures():
    """A future that fails: so does the one that is returned, and the label has the error's class."""
    future = torch.futures.Future()
    with otp.profile() as prof:
        label = otp.record_function("call")
        with label:
            after = label._call_end_callbacks_on_future(future)
        future.set_exception(ValueError("no"))
        with pytest.raises(RuntimeError, match="ValueError: no"):  # so torch tells of errors in what then() runs
            after.wait()
    [error] = [prof.names[text] for text in prof.columns["error_type"].tolist() if text]
    assert error == "ValueError"


def scripted_call(x, y):
    """Torch's test of this, in TorchScript: the label is torch's own there."""
    with otp.record_function("scripted") as label:
        future = torch.jit._fork(torch.add, x, y)
        after = label._call_end_callbacks_on_future(future)
    return torch.jit._wait(after)


def test_futures_in_a_script():
    """Under torch.jit.script the method is torch's own, and its label is recorded."""
    script = torch.jit.script(scripted_call)
    with otp.profile() as prof:
        assert script(X, X).tolist() == [2, 2, 2]
    assert [event.name for event in prof.events()].count("scripted") == 1


class Functions(TorchFunctionMode):
    """Notes every call of a torch function."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Notes every operator."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Functions, Dispatches])
def test_modes_do_not_see_labels(mode):
    """Our label calls nothing of torch's, so a mode sees only what runs inside of it, whether modes are on or off."""
    with otp.profile() as prof, mode() as seen, otp.record_function("label", "args"):
        pass
    assert seen.seen == []
    with otp.profile() as off, mode(), torch._C.DisableTorchFunctionSubclass(), otp.record_function("label"):
        pass
    assert [event.name for event in prof.events()] == [event.name for event in off.events()] == ["label"]
