"""What torch labels with ``_RecordFunctionFast``: kernels of compiled code, phases of dynamo."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

import otel_torchprof as otp  # noqa: E402

native = torch._C._profiler
ORIGINAL = native._RecordFunctionFast
X = torch.ones(2, 3)


def labelled():
    """What inductor makes of a kernel of Triton's and of a compiled graph, with operators inside; an error leaves one."""
    with native._RecordFunctionFast("triton_poi_fused_0", (X, 6, 2.5, True, [X, X]), {"grid": "6,1,1", "stream": 0}):
        X.add(1)
    graph = native._RecordFunctionFast("## Call CompiledFxGraph f1 ##", keyword_values={"scope": "user_scope"})
    with graph, native._RecordFunctionFast("inside"):
        torch.mm(X, X.T)
    with pytest.raises(KeyError), native._RecordFunctionFast("left by an error"):
        raise KeyError


FIELDS = ("name", "scope", "is_user_annotation", "input_shapes", "input_dtypes", "concrete_inputs", "kwinputs")


def found(events):
    """Everything that says what an event is, as far as this torch's profiler tells it."""
    names = [name for name in FIELDS if name in vars(torchs_event())]
    return [
        (*(getattr(event, name) for name in names), event.cpu_parent.name if event.cpu_parent else None)
        for event in events
    ]


@functools.cache
def torchs_event():
    """An event of torch's profiler."""
    with torch.profiler.profile() as prof:
        X.neg()
    return prof.events()[0]


@pytest.mark.parametrize("options", [{}, {"record_shapes": True}, {"record_shapes": True, "profile_memory": True}])
def test_as_torchs_profiler_has_it(options):
    """Names, scopes, parents, inputs and keyword inputs are those that torch's profiler gives."""
    with otp.profile(**options) as ours:
        labelled()
    with torch.profiler.profile(**options) as theirs:
        labelled()
    expected = [event for event in theirs.events() if event.name[0] != "["]
    assert found(event for event in ours.events() if event.name[0] != "[") == found(expected)
    assert len(expected) > 4


@pytest.mark.parametrize("outer", ["ours", "torch's"])
def test_both_profilers_at_once(outer):
    """Where torch's profiler runs on the thread too, each of the two has everything once, with its inputs."""
    profiles = [otp.profile(record_shapes=True), torch.profiler.profile(record_shapes=True)]
    first, second = profiles if outer == "ours" else profiles[::-1]
    with first:
        with second:
            labelled()
        native._RecordFunctionFast("between", (X,)).__enter__()
    one, other = ({event.name: event.kwinputs for event in p.events() if "::" not in event.name} for p in profiles)
    one.pop("between", None), other.pop("between", None)
    assert one == other
    assert one["triton_poi_fused_0"] == {"grid": "6,1,1", "stream": 0}
    assert all(sum(e.name == "inside" for e in p.events()) == 1 for p in profiles)


def test_the_class_is_torchs_again():
    """Nested recordings replace it once, the last to stop puts it back, and what code has kept of it continues to work."""
    with otp.profile() as outer:
        kept = native._RecordFunctionFast
        with otp.profile() as inner, kept("in both"):
            assert native._RecordFunctionFast is kept is not ORIGINAL
        assert native._RecordFunctionFast is kept
        with kept("in one"):
            pass
    assert native._RecordFunctionFast is ORIGINAL
    with kept("after both"):
        pass
    with otp.profile() as later, kept("in a later one"):
        pass
    named = [{event.name for event in prof.events()} for prof in (outer, inner, later)]
    assert named == [{"in both", "in one"}, {"in both"}, {"in a later one"}]


def test_it_ends_where_it_is_left():
    """An object that lives on has ended all the same, also one that began under torch's profiler."""
    with otp.profile() as prof:
        kept = native._RecordFunctionFast("kept")
        with kept:
            pass
        X.add(1)
        with torch.profiler.profile():
            other = native._RecordFunctionFast("of torch's")
            with other:
                pass
            X.mul(2)
    ends = {event.name: event.time_range.end for event in prof.events()}
    starts = {event.name: event.time_range.start for event in prof.events()}
    assert ends["kept"] <= starts["aten::add"]
    assert ends["of torch's"] <= starts["aten::mul"]


def test_somebody_elses_class_stays(monkeypatch):
    """A class that another tool puts there meanwhile is left where it is, and is called."""

    class Theirs:
        made = 0

        def __init__(self, *_args):
            Theirs.made += 1

        def __enter__(self):
            return None

        def __exit__(self, *_exc):
            return None

    monkeypatch.setattr(native, "_RecordFunctionFast", ORIGINAL)
    with otp.profile():
        native._RecordFunctionFast = Theirs
        with native._RecordFunctionFast("theirs"):
            pass
    assert native._RecordFunctionFast is Theirs
    assert Theirs.made == 1
    with otp.profile(), native._RecordFunctionFast("theirs"):
        pass
    assert native._RecordFunctionFast is Theirs
    assert Theirs.made == 2


def test_arguments_are_torchs():
    """Bad arguments raise what torch's class raises, when it is made, entered twice or given names of another kind."""

    def error(action):
        with pytest.raises((TypeError, RuntimeError)) as raised:
            action()
        return type(raised.value), str(raised.value).splitlines()[0]

    def actions():
        twice = native._RecordFunctionFast("twice")

        def enter_twice():
            with twice:
                twice.__enter__()

        return [
            native._RecordFunctionFast,
            lambda: native._RecordFunctionFast("name", wrong=1),
            enter_twice,
        ]

    with torch.profiler.profile():
        expected = [error(action) for action in actions()]
    with otp.profile():
        assert [error(action) for action in actions()] == expected


@pytest.mark.parametrize("all_threads", [False, True])
def test_other_threads(all_threads):
    """On another thread it is recorded where all threads are, and does nothing elsewhere."""
    with otp.profile(all_threads=all_threads) as prof:
        in_threads(labelled)
    assert ("inside" in {event.name for event in prof.events()}) == all_threads


def test_calls_are_torchs():
    """With Python's calls, none of this package's stands between a function and what it labels."""
    with otp.profile(with_stack=True) as prof:
        labelled()
    inside = next(event for event in prof.events() if event.name == "inside")
    assert "otel_torchprof" not in "".join(inside.stack[:2])
    assert inside.stack[0].endswith(": labelled")


@torch.compile(backend="eager")
def compiled(x):
    """Two graphs."""
    x = x.relu() + 1
    torch._dynamo.graph_break()
    return x.sigmoid()


def test_compiled_code_as_torchs_profiler_has_it():
    """Calls of compiled code have dynamo's regions, as often as in torch's profiler, and nothing is compiled again."""

    def call():
        for _ in range(3):
            compiled(X)

    call()
    with torch._dynamo.config.patch(error_on_recompile=True):
        with otp.profile() as ours:
            call()
        with torch.profiler.profile() as theirs:
            call()
        call()
    ours_named, theirs_named = (Counter(event.name for event in prof.events()) for prof in (ours, theirs))
    assert ours_named == theirs_named


def test_phases_of_a_compilation():
    """The phases of a compilation are labelled as in torch's profiler."""

    def compiling(profile):
        torch._dynamo.reset()
        with profile as prof:
            torch.compile(lambda x: x.sin() + 2, backend="eager")(X)
        return Counter(event.name for event in prof.events())

    compiling(otp.profile())  # the first one in a process runs more
    ours, theirs = compiling(otp.profile()), compiling(torch.profiler.profile())
    for name in [name for name in ours if name.startswith("TorchDynamo Compile: ")]:
        assert ours.pop(name) == 1  # a label of this package's own
    assert any("dynamo_timed" in name for name in theirs)
    assert ours == theirs


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Skipping serialization")  # of torch 2.6
def test_inductors_code_as_torchs_profiler_has_it():
    """A model that inductor compiled has the same events, with the same inputs, as in torch's profiler."""
    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU()))
    with torch.no_grad():
        model(X)
        model(X)
        profiles = []
        for make in (otp.profile, torch.profiler.profile):
            with make(record_shapes=True) as prof:
                model(X)
            profiles.append(prof)
    ours, theirs = (found(prof.events()) for prof in profiles)
    assert ours == theirs
    assert any("Compiled" in name for name, *_ in ours)
