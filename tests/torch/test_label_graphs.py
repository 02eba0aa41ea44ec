"""Labels and labelled functions inside torch.compile, torch.jit and torch.fx, imported before torch and after it; labels without torch."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", minversion="2.6")

from observed import succeeds

GRAPHS = """
{imports}
import warnings
warnings.simplefilter("ignore")

def ours(x: torch.Tensor) -> torch.Tensor:
    with otp.record_function("outer"):
        y = x + 1
        with otp.record_function("inner", "args"):
            return y.neg()

def theirs(x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("outer"):
        y = x + 1
        with torch.profiler.record_function("inner", "args"):
            return y.neg()

def left(function):
    found, x = [], torch.ones(3)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(fullgraph=True, backend=backend)(function)
        assert torch.equal(compiled(x), -(x + 1))
        with otp.profile() as prof:
            compiled(x)
        names = [event.name for event in prof.events()]
        assert "aten::neg" in names, names
        found.append(sorted(set(names) & {{"outer", "inner"}}))
    scripted = torch.jit.script(function)
    for _ in range(3):
        scripted(x)
    with otp.profile() as prof:
        scripted(x)
    inner = {{event.name: event for event in prof.events()}}["aten::neg"].cpu_parent
    assert (inner.name, inner.cpu_parent.name) == ("inner", "outer")
    return found

assert left(ours) == left(theirs)
with otp.profile(operators=False) as prof, otp.record_function("outside"):
    pass
assert [event.name for event in prof.events()] == ["outside"]
"""
MODEL = """
import torch

def double(x: torch.Tensor) -> torch.Tensor:
    return helper(x) * 2

def helper(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return double(self.linear(x))
"""

FUNCTIONS = """
import warnings
warnings.simplefilter("ignore")
import otel_torchprof as otp
labels = otp.label_functions(["labelled_model.double", "labelled_model:Model.forward", "torch.nn.Linear.forward linear"])
import torch
import labelled_model
assert len(labels.labelled) == 3

def names(run):
    run(x)
    with otp.profile() as prof:
        run(x)
    return [event.name for event in prof.events()]

x = torch.ones(2, 3)
model = labelled_model.Model()
expected = model(x)
assert names(model)[:3] == ["labelled_model.Model.forward", "linear", "aten::linear"], names(model)

scripted = torch.jit.script(model)
assert torch.equal(scripted(x), expected)
assert "aten::relu" in names(scripted)
assert torch.equal(torch.jit.script(labelled_model.double)(x), 2 * x)
assert torch.equal(torch.jit.trace(model, x)(x), expected)
assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)

compiled = torch.compile(model, fullgraph=True, backend="eager")
assert torch.equal(compiled(x), expected)
assert "aten::relu" in names(compiled)

labels.remove()
assert names(model)[0] == "aten::linear"
"""

ALL = """
import json, runpy, traceback
found = {}
for program in ("functions.py", "labels.py"):
    try:
        runpy.run_path(program, run_name="__main__")
        found[program] = ""
    except Exception:
        found[program] = traceback.format_exc()
print(json.dumps(found))
"""
"""Both programs, of which the first one has the package label functions before torch is imported."""


@pytest.fixture(scope="module")
def ours_first(tmp_path_factory):
    """What each of the programs raised in an interpreter that imports the package before torch."""
    folder = tmp_path_factory.mktemp("programs")  # TorchScript and dynamo read the source
    (folder / "labelled_model.py").write_text(MODEL)
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "labels.py").write_text(GRAPHS.format(imports=IMPORTS["ours first"]))
    return json.loads(succeeds(f"import os, sys; os.chdir({str(folder)!r}); sys.path.insert(0, '')\n{ALL}"))


IMPORTS = {
    "ours first": "import otel_torchprof as otp; import torch",
    "torch first": "import torch, torch._dynamo; import otel_torchprof as otp",
    "looked for": "import otel_torchprof as otp, importlib.util, torch; importlib.util.find_spec('torch._dynamo')",
}


@pytest.mark.parametrize(
    "imports", ["ours first", "torch first", pytest.param("looked for", marks=pytest.mark.exhaustive)]
)
def test_in_graphs(tmp_path, request, imports):
    """A label breaks no graph of torch.compile and compiles in TorchScript, whichever was imported first: as torch's own."""
    if imports == "ours first":
        assert request.getfixturevalue("ours_first")["labels.py"] == ""
        return
    path = tmp_path / "program.py"  # TorchScript and dynamo read the source
    path.write_text(GRAPHS.format(imports=IMPORTS[imports]))
    program = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    succeeds(program, has_torch=imports == "torch first")


def test_functions_in_graphs(ours_first):
    """Labelled functions and methods compile in TorchScript, dynamo without a break, and fx, and compute what they did."""
    assert ours_first["functions.py"] == ""


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import otel_torchprof as otp
for operators in (None, False):
    with otp.profile(operators=operators) as prof, otp.record_function("label"):
        pass
    assert [event.name for event in prof.events()] == ["label"]
    assert prof.table() and list(prof.to_otlp()) and len(prof.spans()) == 2
    assert prof.health.operators.startswith("off: "), prof.health
assert "torch is not installed" in otp.profile().health.operators
try:
    otp.profile(operators=True)
except otp.TorchLibraryError as error:
    assert "install it" in str(error) and "profile(operators=False)" in str(error), error
else:
    raise AssertionError("operators=True without torch")
assert not [name for name in sys.modules if name.startswith("torch.")]
"""


def test_without_torch():
    """Without torch labels work, and operators=True says what to do."""
    succeeds(WITHOUT_TORCH)


def test_a_folder_named_torch_is_not_torch(tmp_path):
    """A folder named torch on the path, which Python imports as an empty package, counts as no torch."""
    (tmp_path / "torch").mkdir()
    program = (
        "import numpy, opentelemetry.sdk.trace, cffi, sys, importlib\n"
        "class Blocks:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        "            return importlib.machinery.PathFinder.find_spec(name, [" + repr(str(tmp_path)) + "])\n"
        "import importlib.machinery\n"
        "sys.meta_path.insert(0, Blocks())\n"
        "import otel_torchprof as otp\n"
        "assert otp.profile().health.operators == 'off: torch is not installed'\n"
    )
    succeeds(program)


def test_the_package_imports_no_torch():
    """Importing the package and using labels imports no torch."""
    succeeds(
        "import sys, otel_torchprof as otp\n"
        "with otp.profile(operators=False), otp.record_function('x'): pass\n"
        "assert 'torch' not in sys.modules"
    )
