"""What code that imports torch.autograd.profiler_util finds here: every name, every attribute, the same answers."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_torchprof import profiler_util
from otel_torchprof._columns.batch import Batch
from otel_torchprof._profile import function_event

theirs = pytest.importorskip("torch.autograd.profiler_util", reason="compares with torch's module")

INTERNAL = {"_EVENT_METADATA_KEYS", "_to_str", "_to_bool"}
"""How torch reads metadata; nobody else uses them."""
DEPRECATED = {"cuda_time", "cuda_time_total", "self_cuda_time_total", "self_cuda_memory_usage", "metadata_json"}


def own_names(module):
    """The names that a module defines, without what it imports."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("__") and not isinstance(value, types.ModuleType)
        if getattr(value, "__module__", module.__name__) == module.__name__
    }


def attributes(instance):
    """Everything that can be read from an instance, without what every object has."""
    return {name for name in dir(instance) if not name.startswith("__")}


def test_every_name_of_the_module():
    """All that torch's module defines can be imported from ours, under the same name."""
    missing = {name for name in own_names(theirs) if not hasattr(profiler_util, name)}
    assert missing == INTERNAL
    assert set(theirs.__all__) <= set(profiler_util.__all__)
    assert profiler_util.MEMORY_EVENT_NAME == theirs.MEMORY_EVENT_NAME
    assert profiler_util.OUT_OF_MEMORY_EVENT_NAME == theirs.OUT_OF_MEMORY_EVENT_NAME


@pytest.mark.parametrize(
    "made", [lambda util: util.FunctionEvent(1, "a", 2, 3, 7), lambda util: util.FunctionEventAvg()]
)
def test_every_attribute(made):
    """Events and averages have every attribute and method that torch's have, with the same value in a new one."""
    ours, torchs = made(profiler_util), made(theirs)
    names = attributes(torchs) - DEPRECATED
    assert names <= attributes(ours)
    values = {name: getattr(torchs, name) for name in names}
    plain = [name for name, value in values.items() if value is None or isinstance(value, int | float | str | list)]
    assert {name: getattr(ours, name) for name in plain} == {name: values[name] for name in plain}
    assert len(plain) > 15


def test_recorded_events_have_every_attribute():
    """An event out of a recording has every attribute that torch's have, deprecated ones too."""
    recorded = profiler_util.EventList.of(Batch.of({"start": [0], "end": [1]}, [""]), origin_ns=0)[0]
    names = attributes(theirs.FunctionEvent(1, "a", 2, 3, 7))
    assert {name for name in names - DEPRECATED if not hasattr(recorded, name)} == set()
    for name in DEPRECATED:
        with pytest.warns(FutureWarning):
            getattr(recorded, name)


@pytest.mark.parametrize("name", sorted(DEPRECATED))
def test_every_deprecated_attribute(name):
    """Deprecated attributes answer as torch's, with the same category and a text that a filter for torch's catches."""
    answers, caught = [], []
    for util in (profiler_util, theirs):
        event = util.FunctionEvent(1, "a", 2, 3, 7, metadata_json='{"a": 1}')
        with pytest.warns(FutureWarning, match=f"^`{name}` is deprecated") as warnings:
            answers.append(getattr(event, name))
        caught += [(warning.category, warning.filename) for warning in warnings]
    assert answers[0] == answers[1]
    assert caught[0] == caught[1] == (FutureWarning, __file__)


def test_every_method_of_the_list():
    """The list has torch's methods with torch's arguments in torch's order, and torch's properties."""
    inherited = set(dir(list))
    steps_of_the_tree = {"_populate_cpu_children", "_remove_dup_nodes", "_set_backward_stacktraces"}
    names = {name for name in vars(theirs.EventList) if name not in inherited and not name.startswith("__")}
    for name in names - steps_of_the_tree:
        ours, torchs = getattr(profiler_util.EventList, name), getattr(theirs.EventList, name)
        if callable(torchs):
            mine, other = (list(inspect.signature(method).parameters.values()) for method in (ours, torchs))
            own = [p for p in mine if p.kind is p.KEYWORD_ONLY and p.name not in {q.name for q in other}]
            # Torch has it from 2.14 on; the default is the version's, and chosen when it is called.
            last = "include_python_functions"
            compared = [
                [(p.name, p.default) for p in each if p not in own and p.name != last] for each in (mine, other)
            ]
            assert compared[0] == compared[1], name
            assert last in {p.name for p in mine} or last not in {p.name for p in other}
    assert (
        profiler_util.EventList().supported_export_stacks_metrics()
        == theirs.EventList().supported_export_stacks_metrics()
    )


@given(
    st.text(max_size=8) | st.sampled_from(("Pd", "t", "St", "_Z3foov", "_ZN2at4_ops3addE", "_Zbad", "ProfilerStep#3"))
)
def test_names_are_rewritten_as_torchs(name):
    """Readable and wildcard names are torch's for any text, also where the system's library makes them."""
    if "\0" in name:
        return  # torch reads up to there
    assert profiler_util._rewrite_name(name) == theirs._rewrite_name(name)
    assert profiler_util._rewrite_name(name, with_wildcard=True) == theirs._rewrite_name(name, with_wildcard=True)
    assert profiler_util.StringTable()[name] == theirs.StringTable()[name]
    assert function_event._demangled_by_the_system(name) == profiler_util.demangle(name)


def test_names_without_torch(monkeypatch):
    """Where torch is not imported, the system's library makes a C++ name readable; where that is not, it stays."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert profiler_util.demangle("_ZN2at18hasGlobalCallbacksEv") == "at::hasGlobalCallbacks()"
    assert profiler_util.demangle("a\0b") == "a\0b"
    monkeypatch.setattr(function_event, "_cxx_functions", lambda: None)
    assert profiler_util.demangle("_Z3foov") == "_Z3foov"


@pytest.mark.parametrize(
    "name", ["[memory]", "[OutOfMemory]", "aten::is_leaf", "aten::mm", "profiler::_record_function_enter_new", "\udc80"]
)
def test_names_are_filtered_as_torchs(name):
    """Utility operators are filtered, others are not."""
    assert profiler_util._filter_name(name) == theirs._filter_name(name)


FILES = ("torch/autograd/__init__.py", "torch/tensor.py", "a/_internal/common_utils.py", "train.py")
FUNCTIONS = ("_make_grads", "backward", "prof_callable", "prof_func_call", "prof_meth_call", "main")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_stack_entries_are_filtered_as_torchs(file, function):
    """Entries of torch's own plumbing are left out, all others stay."""
    entry = f"{file}(12): {function}"
    assert profiler_util._filter_stack_entry(entry) == theirs._filter_stack_entry(entry)


class Begins:
    """A record that begins at a time."""

    def __init__(self, at):
        self._at = at

    def start_ns(self):
        """The time, ns."""
        return self._at


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(-1, 21), st.integers(-1, 21))
def test_memory_records_are_found_as_torchs(times, start, end):
    """The same records for any interval, in the same order, ends included."""
    records = [(Begins(time), False) for time in times]
    found = list(profiler_util.MemRecordsAcc(records).in_interval(start, end))
    assert found == list(theirs.MemRecordsAcc(records).in_interval(start, end))


METADATA = {
    "registers per thread": "32",
    "grid": "[1, 2, 3]",
    "occupancy": '{"a": 0.5}',
    "blocks per SM": "0.25",
    "Collective name": '"allreduce"',
    "Is asynchronized op": "true",
    "Seq": "7",
}


@pytest.mark.parametrize("texts", [METADATA, {"Is asynchronized op": "0"}, {"what": "ever"}, {}, {"stream": None}])
def test_metadata_is_read_as_torchs(texts):
    """The fields of a device's event, in torch's order and types; None where nothing is known."""
    assert profiler_util._build_metadata(texts) == theirs._build_metadata(texts)
    ours, torchs = (util.FunctionEvent(1, "k", 1, 0, 1, extra_meta=texts) for util in (profiler_util, theirs))
    assert ours.event_metadata == torchs.event_metadata


def test_metadata_has_torchs_fields():
    """Every key that torch knows is read into the same field."""
    assert profiler_util.EventMetadata._fields == theirs.EventMetadata._fields
    for key, (field, _) in theirs._EVENT_METADATA_KEYS.items():
        text = "[1]" if field in {"grid", "block", "occupancy"} else "1"
        assert profiler_util._build_metadata({key: text}) == theirs._build_metadata({key: text}), key


@given(st.sampled_from((0, 1, 2_500_000.0)) | st.floats(0, 1e9), st.integers(-(2**34), 2**34))
def test_shares_and_formatters_are_torchs(part, size):
    """A time, a size, a share of a total, and a property that says another one as text."""
    holder = type("Holder", (), {"x": part, "x_str": profiler_util._attr_formatter("x")})
    assert holder().x_str == theirs._format_time(part)
    assert profiler_util._format_time_share(part, 3e6) == theirs._format_time_share(part, 3e6)
    assert profiler_util._format_time_share(0, 0) == theirs._format_time_share(0, 0)
    assert profiler_util._format_memory(size) == theirs._format_memory(size)


STACK = "  File a\n    y = x + 1\n        ~~^~~\n"


def test_traces_are_made_canonical_as_torchs():
    """Events of a trace become the same lines, by start, with the last line of source that is one."""
    events = [
        {"name": "n" * 40, "args": {"node_name": "add", "stack_trace": STACK}, "ts": 5},
        {"name": "first", "args": {"stack_trace": "\n"}, "ts": 2},
        {"args": {}},
    ]
    text = profiler_util._canonicalize_profiler_events(events)
    assert text == theirs._canonicalize_profiler_events(events)
    assert "y = x + 1" in text
