"""Labels without a change of code: functions that a file or a list names."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import itertools
import json
import logging
import pickle
import sys
import threading

import forked_programs
import pytest
from label_trees import tree
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from threaded import in_threads

import otel_torchprof as otp
from otel_torchprof import record_function
from otel_torchprof._process import after_import
from otel_torchprof._record import function_labels
from otel_torchprof.errors import forget_warnings

LIBRARY = '''
import functools
import json

def plain(x, *, y=1):
    """Adds."""
    return x + y

def generator():
    yield from (1, 2)

async def coroutine():
    return 1

async def async_generator():
    yield 1

class Base:
    def inherited(self):
        return "inherited"

class Model(Base):
    class Inner:
        def deep(self):
            return "deep"

    def method(self):
        return "method"

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls):
        return cls

    @property
    def attribute(self):
        return 1

class Derived(Model):
    pass

@functools.lru_cache
def cached():
    return 1

from operator import index
'''

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _said_nothing():
    forget_warnings()
    yield
    assert function_labels._entries == {}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Name of a package with a module ``part``, neither of which is imported."""
    name = f"labelled_package_{next(_numbers)}"
    folder = tmp_path / "on_path" / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder.parent)
    yield name
    for module in (name, f"{name}.part"):
        sys.modules.pop(module, None)
        after_import._waiting.pop(module, None)


@pytest.fixture
def part(package):
    """The module, imported."""
    return importlib.import_module(f"{package}.part")


def events(program):
    """The labels that a program makes."""
    with otp.profile(operators=False) as prof:
        program()
    return tree(prof)


def test_a_function(part):
    """Calls are events under the name that was listed until the labels are removed, but for who took the function before; then all is as before."""
    before = part.plain
    labels = otp.label_functions([f"{part.__name__}:plain"])
    assert labels.labelled == (f"{part.__name__}:plain",)
    assert events(lambda: (part.plain(1, y=2), before(1))) == [f"{part.__name__}.plain"]
    assert labels.remove() == labels.remove() == ()
    assert part.plain is before
    assert events(lambda: part.plain(1)) == []


def test_what_a_labelled_function_looks_like(part):
    """Name, documentation, signature, sort and pickle of a function are those of before; what is suspended is labelled to its end."""
    kinds = ("plain", "coroutine", "generator", "async_generator")
    with otp.label_functions([f"{part.__name__}:{name} {name}" for name in kinds]):
        assert events(lambda: list(part.generator())) == ["generator"]
        assert events(lambda: asyncio.run(part.coroutine())) == ["coroutine"]
        assert inspect.isasyncgenfunction(part.async_generator)
        assert (part.plain.__name__, part.plain.__doc__) == ("plain", "Adds.")
        assert part.plain.__module__ == part.__name__
        assert str(inspect.signature(part.plain)) == "(x, *, y=1)"
        assert inspect.getsource(part.plain).startswith("def plain")
        assert inspect.iscoroutinefunction(part.coroutine)
        assert inspect.isgeneratorfunction(part.generator)
        assert pickle.loads(pickle.dumps(part.plain)) is part.plain  # noqa: S301 - our own


def test_methods(part):
    """Methods of every sort are labelled, keep how they are called, and are put back as what they were."""
    kept = dict(vars(part.Model))
    names = ("method", "static", "of_class", "Inner.deep")
    with otp.label_functions([f"{part.__name__}.Model.{name} {name}" for name in names]):
        model = part.Derived()

        def program():
            assert model.method() == "method"
            assert (model.static(3), part.Model.static(4)) == (3, 4)
            assert model.of_class() is part.Derived
            assert part.Model.Inner().deep() == "deep"

        assert events(program) == ["method", "static", "static", "of_class", "Inner.deep"]
        assert isinstance(vars(part.Model)["static"], staticmethod)
        assert isinstance(vars(part.Model)["of_class"], classmethod)
    assert dict(vars(part.Model)) == kept


def test_an_inherited_method(part):
    """A method that a class has from another is labelled where the class itself is asked, and only there."""
    with otp.label_functions([f"{part.__name__}:Model.inherited own"]):
        assert events(lambda: (part.Model().inherited(), part.Derived().inherited())) == ["own", "own"]
        assert events(part.Base().inherited) == []
    assert "inherited" not in vars(part.Model)


def test_functions_of_c(part):
    """A C function of a module is labelled, one of a class too."""
    with otp.label_functions([f"{part.__name__}:index c"]):
        assert events(lambda: part.index(3)) == ["c"]


def test_modules_that_come_later(package):
    """What is in a module that is not imported yet is labelled once it is, with a colon or a dot, not after the removal; nothing is imported."""
    labels = otp.label_functions([f"{package}.part.plain first", f"{package}.part:Model.method second"])
    removed = otp.label_functions([f"{package}.part:generator"])
    assert (labels.labelled, len(labels.waiting)) == ((), 2)
    removed.remove()
    assert not {package, f"{package}.part"} & set(sys.modules)
    part = importlib.import_module(f"{package}.part")
    assert (len(labels.labelled), labels.waiting) == (2, ())
    assert events(lambda: (part.plain(1), part.Model().method(), list(part.generator()))) == ["first", "second"]
    labels.remove()
    assert events(lambda: part.plain(1)) == []


def test_what_does_not_come(package, caplog):
    """A function that its module turns out not to have is warned of once, with line, text and way out; the import goes on."""
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        for _ in range(2):
            labels = otp.label_functions([f"{package}.part:nothing", f"{package}.part:plain"])
            part = importlib.import_module(f"{package}.part")
            assert labels.labelled == (f"{package}.part:plain",)
            labels.remove()
            del sys.modules[part.__name__]
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(
        f"line 1: '{package}.part:nothing' cannot be labelled: {package}.part has no nothing; name the"
    )


def test_two_that_want_the_same(part):
    """A function is labelled once for all who list it, by any name, until the last of them has gone."""
    before = part.plain
    first = otp.label_functions([f"{part.__name__}:plain"])
    second = otp.label_functions([f"{part.__name__}.plain", f"{part.__name__}:plain"])
    assert events(lambda: part.plain(1)) == [f"{part.__name__}.plain"]
    first.remove()
    assert events(lambda: part.plain(1)) == [f"{part.__name__}.plain"]
    second.remove()
    assert part.plain is before


def test_what_is_labelled_in_the_code(part):
    """A function that has a label of ours in the code, or under another decorator, gets no second one."""
    before = part.plain
    part.plain = functools.wraps(before)(functools.partial(record_function("own")(before)))

    @functools.wraps(labelled := record_function("own")(before))
    def enclosing(*args):
        return labelled(*args)

    part.plain = enclosing
    with otp.label_functions([f"{part.__name__}:plain"]) as labels:
        assert labels.labelled == ()
        assert events(lambda: part.plain(1)) == ["own"]
    assert part.plain is enclosing


def test_another_tool_on_top(part):
    """What another tool has put around a labelled function stays, and the removal says so; labelled again, it is labelled once."""
    labels = otp.label_functions([f"{part.__name__}:plain"])

    @functools.wraps(labelled := part.plain)
    def enclosing(*args):
        return labelled(*args)

    part.plain = enclosing
    assert labels.remove() == (f"{part.__name__}:plain",)
    assert part.plain is enclosing
    with otp.label_functions([f"{part.__name__}:plain"]):
        assert events(lambda: part.plain(1)) == [f"{part.__name__}.plain"]


def test_a_file(part, tmp_path):
    """A file may have comments, empty lines and names of labels with spaces in them."""
    file = tmp_path / "labels.txt"
    lines = ["\ufeff# ours", "", f"  {part.__name__}:plain   adding up  # sums", f"{part.__name__}:generator\t#"]
    file.write_text("\r\n".join(lines))
    with otp.label_functions(file) as labels:
        assert len(labels.labelled) == 2
        assert events(lambda: (part.plain(1), list(part.generator()))) == ["adding up", f"{part.__name__}.generator"]
    otp.label_functions(str(file)).remove()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{}", "names no function; write package.module:function"),
        ("{}:", "names no function"),
        ("{}:a:b", "names no function"),
        ("{}:a-b", "names no function"),
        (".{}:plain", "names no function"),
        ("{}.part:nothing", "has no nothing; name the module or class that defines it"),
        ("{}.part.nothing", "has no nothing; name"),
        ("{}.part.nothing.at.all", "has no nothing; name"),
        ("{}.part:Model.nothing", "Model has no nothing; name"),
        ("{}.part:Model", "Model is a class; name a function or a method"),
        ("{}.part:Model.attribute", "attribute is of type property; name a function"),
        ("{}.part:cached", "cached is of type _lru_cache_wrapper; name a function"),
        ("{}.part:plain.inner", "plain is of type function, neither a module nor a class"),
        ("{}.part:json.dumps", "json is a module: put the colon behind it"),
        ("no_such_module:function", "there is no module no_such_module on sys.path"),
        ("builtins:int.bit_length", "does not let it be replaced: TypeError"),
    ],
)
def test_what_is_refused(package, part, line, text):
    """A line that names no function is refused with its place, its text and the way out; then no other is labelled either."""
    line = line.format(package)
    before = dict(vars(part))
    with pytest.raises(ValueError, match=text) as refused:
        otp.label_functions(["# a comment", f"{package}.part:plain", line])
    assert str(refused.value).startswith("line 3: ")
    assert repr(line) in str(refused.value)
    assert dict(vars(part)) == before


def test_other_names_for_the_same(part):
    """A function that is listed under two names for its label is refused, with the place of the other."""
    with pytest.raises(ValueError, match=r"line 2: .*is labelled 'one' already, by line 1"):
        otp.label_functions([f"{part.__name__}:plain one", f"{part.__name__}.plain two"])


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (3, TypeError, r"label_functions\(\) got 3; it takes the path of a file, or a list"),
        (b"a:b", TypeError, "got b'a:b'"),
        ([3], TypeError, "line 1 is 3; it must be a str"),
        ("json:dumps", FileNotFoundError, r"no file 'json:dumps'; names are given as a list: label_functions\(\['json"),
        ("/", OSError, "'/' is no file"),
    ],
)
def test_what_is_no_list(source, error, text):
    """What is neither a file nor a list is refused with its value and the way out."""
    with pytest.raises(error, match=text):
        otp.label_functions(source)


def test_from_many_threads(package):
    """Threads that label, import and remove at the same time leave the functions as they were."""
    module = f"{package}.part"
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        for _ in range(20):
            with otp.label_functions([f"{module}:plain", f"{module}.Model.method"]):
                importlib.import_module(module).plain(1)

    in_threads(*[work] * 8)
    part = sys.modules[module]
    assert not hasattr(part.plain, "__wrapped__")
    assert not hasattr(part.Model.method, "__wrapped__")


# ---- the file of the environment ----

PROGRAM = """
import json, logging, sys
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("otel_torchprof").addHandler(handler)
import otel_torchprof as otp

def step():
    return json.dumps({})

def run():
    with otp.profile(operators=False) as prof:
        step()
    notes.append(list(prof.health.notes))
    return prof

notes = []
profs = [run(), run()]
import labelled_later
profs.append(run())
labelled_later.called()
with otp.profile(operators=False) as prof:
    labelled_later.called()
profs.append(prof)
print(json.dumps({
    "events": [[event.name for event in prof.events()] for prof in profs],
    "notes": notes,
    "said": said,
}))
"""


def outcome(folder, monkeypatch, lines):
    """What a program records whose environment names a file with these lines."""
    (folder / "labels.txt").write_text(lines)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "labelled_later.py").write_text("def called(): pass\n")
    monkeypatch.setenv("OTEL_TORCHPROF_LABELS", str(folder / "labels.txt"))
    done = forked_programs.run([sys.executable, str(folder / "program.py")])
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_the_file_of_the_environment(tmp_path, monkeypatch):
    """What the file lists is labelled from the first recording on, in later modules too; bad lines are warned of once, and ignored."""
    lines = "json:dumps\n__main__:step a step\nlabelled_later:called later\njson dumps\n\njson:no_such\nlabelled_later:missing\n"
    found = outcome(tmp_path, monkeypatch, lines)
    assert found["events"] == [["a step", "json.dumps"]] * 3 + [["later"]]
    assert all("labelled_later:called" in notes[0] for notes in found["notes"][:2])
    assert found["notes"][2] == []
    file = tmp_path / "labels.txt"
    assert [text.partition("; ")[0] for text in found["said"]] == [
        f"OTEL_TORCHPROF_LABELS: {file}:4: 'json dumps' names no function",
        f"{file}:6: 'json:no_such' cannot be labelled: json has no no_such",
        f"{file}:7: 'labelled_later:missing' cannot be labelled: labelled_later has no missing",
    ]
    assert all(text.endswith("; it is ignored") for text in found["said"])


@pytest.mark.parametrize("bad", ["missing", "folder", "binary"])
def test_a_file_that_cannot_be_read(tmp_path, monkeypatch, caplog, bad):
    """A file that is not there, or is none, is warned of once, by variable and value; the recording goes on."""
    path = {"missing": tmp_path / "no.txt", "folder": tmp_path, "binary": tmp_path / "binary"}[bad]
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setenv("OTEL_TORCHPROF_LABELS", str(path))
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        assert events(lambda: record_function("own").__enter__()) == ["own ..."]
        assert events(lambda: None) == []
    (record,) = caplog.records
    assert record.getMessage().startswith(f"OTEL_TORCHPROF_LABELS={str(path)!r} is ignored: ")
    assert "label_functions" not in record.getMessage()


def test_what_the_script_defines_after_the_instrumentation_has_begun(tmp_path, monkeypatch, caplog):
    """A script's and a module's functions are spans once they are there; what never comes is warned of at the end, once."""
    monkeypatch.setenv("OTEL_TORCHPROF_LABELS", str(tmp_path / "labels.txt"))
    (tmp_path / "labels.txt").write_text(
        "__main__:defined_later later\n__main__:never\n__main__:Never.more\nmodule_to_come:called module\n"
    )
    (tmp_path / "module_to_come.py").write_text("def called(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    exporter = InMemorySpanExporter()
    processor, provider = otp.TorchSpanProcessor(exporter), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="modules", skip_dep_check=True)
        try:
            (note,) = (note for note in processor.health.notes if str(tmp_path) in note)
            assert "__main__:defined_later" in note
            script = sys.modules["__main__"]
            monkeypatch.setattr(script, "defined_later", lambda: None, raising=False)
            provider.force_flush()
            script.defined_later()
            importlib.import_module("module_to_come").called()
            assert not any("__main__:defined_later" in note for note in processor.health.notes)
            assert not caplog.records
        finally:
            otp.TorchInstrumentor().uninstrument()
            function_labels._of_environment.popitem()[1].remove()
            forget_warnings()
    provider.shutdown()
    assert [span.name for span in exporter.get_finished_spans()] == ["later", "module"]
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition("; ")[0] for text in said] == [
        f"{tmp_path / 'labels.txt'}:{line} cannot be labelled: __main__ has no {name}"
        for line, name in (("2: '__main__:never'", "never"), ("3: '__main__:Never.more'", "Never"))
    ]
