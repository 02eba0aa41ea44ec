"""Layers import only leftwards, and importing the package stays cheap. Read from the sources, so that nothing slips by."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parent.parent / "otel_torchprof"
FOUNDATION = ("config", "errors", "health", "markup", "parsers", "version")
"""Modules at the top from which everything may import; the others there are for users and stand at the right end."""
ORDER = (
    "_process",
    "_columns",
    "_native",
    "_model",
    "_record",
    "_encode",
    "_ranks",
    "_export",
    "_files",
    "_answers",
    "_profile",
    "integrations",
    "_instrument",
    "_cli",
)
"""The folders, left to right. ``integrations`` has no underscore, since its names are for users; the instrumentation uses it too."""
BUILD_SCRIPT = PACKAGE / "_native" / "build.py"
"""Run by setuptools while the package is built, never imported by it: it reads the repository and needs cffi's compiler."""

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != BUILD_SCRIPT)


parsed = functools.cache(ast.parse)
"""The tree of a module's text, which each rule looks through."""


def rank(module: str) -> int:
    """Place of a module (dotted, without the package's name) in the order of folders."""
    folder = module.partition(".")[0]
    if folder in FOUNDATION:
        return 0
    return ORDER.index(folder) + 1 if folder in ORDER else len(ORDER) + 1


def dotted(path: Path) -> str:
    """The module's name without the package's: ``_columns.batch``; empty for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node: ast.AST, path: Path) -> list[str]:
    """Absolute names of what one import statement may bring in; nothing for other statements."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        folder = path.relative_to(PACKAGE.parent).parent.parts
        base = ".".join([*folder[: len(folder) - node.level + 1], *([node.module] if node.module else [])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def all_imports(source: str, path: Path) -> list[str]:
    """Everything imported anywhere in a module, inside functions too."""
    return [name for node in ast.walk(parsed(source)) for name in imported(node, path)]


def imports_at_import(source: str, path: Path) -> list[str]:
    """What importing the module runs: not the bodies of functions, not what stands under ``if TYPE_CHECKING``."""

    def statements(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child
            yield from statements(child)

    return [name for node in statements(parsed(source)) for name in imported(node, path)]


def backward_imports(source: str, path: Path) -> list[str]:
    """The imports of a module that go to the right."""
    own = rank(dotted(path))
    inside = [
        name.removeprefix("otel_torchprof.") for name in all_imports(source, path) if name.startswith("otel_torch")
    ]
    # `from .. import x` also lists the package itself, which is a name and not a layer.
    return [name for name in inside if name != "otel_torchprof" and rank(name) > own]


def top(names: list[str]) -> set[str]:
    """The top-level packages among dotted names."""
    return {name.partition(".")[0] for name in names}


def arrows() -> dict[str, set[str]]:
    """By module: the modules of the package that it imports, inside functions and for types too."""
    names = {dotted(path): path for path in MODULES}
    found = {}
    for module, path in names.items():
        inside = (each.removeprefix("otel_torchprof.") for each in all_imports(path.read_text(), path))
        found[module] = {each for each in inside if each in names} - {module, ""}
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another, directly or by way of others, the largest first (Tarjan, SIAM J. Comput. 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(found, key=len, reverse=True)


def test_folders_import_only_leftwards():
    """No module imports from a folder to the right of its own, at any place in its source."""
    backward = {dotted(path): backward_imports(path.read_text(), path) for path in MODULES}
    assert {module: names for module, names in backward.items() if names} == {}


def test_every_folder_has_its_place():
    """A folder of the package is one of those that have an order, and every one of these is there."""
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ORDER)


def test_no_modules_import_one_another():
    """There is no cycle, not for types either; and the check would find one."""
    assert cycles(arrows()) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_few_modules_stand_at_the_top():
    """At the top are names for users and what everything needs; an idea has its place in a folder."""
    assert len([path for path in MODULES if path.parent == PACKAGE]) <= 14


def test_torch_is_never_imported_at_module_level():
    """Torch is optional and slow to import: only functions that were asked for it import it."""
    assert [dotted(path) for path in MODULES if "torch" in top(imports_at_import(path.read_text(), path))] == []


@pytest.mark.parametrize("compiled", ["_core", "_python"])
def test_only_ffi_imports_what_is_compiled(compiled):
    """Exactly one module imports each compiled one; everything else gets it from there, attached to the core."""
    name = f"otel_torchprof._native.{compiled}"
    assert [dotted(path) for path in MODULES if name in all_imports(path.read_text(), path)] == ["_native.ffi"]


def foreign(source: str, path: Path) -> set[str]:
    """What a module imports of cffi, or of that which hands out its pointers: for ``_native`` only."""
    names = all_imports(source, path)
    inside = {name.partition(f"{PACKAGE.name}._native.")[2] for name in names}
    boundary = {
        name for name in inside if name.split(".")[0] == "ffi" or name.split(".")[-1] in {"ffi", "lib", "pointer"}
    }
    return boundary | top(names) & {"cffi", "_cffi_backend"}


def test_only_native_knows_cffi():
    """Outside of ``_native`` nobody has a pointer in hand: what calls C takes and returns Python's values and arrays."""
    others = [path for path in MODULES if not dotted(path).startswith("_native")]
    found = {dotted(path): foreign(path.read_text(), path) for path in others}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from .._native.ffi import lib", {"ffi", "ffi.lib"}),
        ("def f():\n    from otel_torchprof._native import ffi", {"ffi"}),
        ("from .._native.loops import ffi, pointer", {"loops.ffi", "loops.pointer"}),
        ("from cffi import FFI\nimport _cffi_backend", {"cffi", "_cffi_backend"}),
        ("from .._native.loops import add_to_parents\nfrom .._native import sigterm", set()),
    ],
)
def test_the_check_finds_cffi(source, found):
    """The check sees cffi itself, the module that has it, and names that another module of ``_native`` passes on."""
    assert foreign(source, PACKAGE / "_encode" / "x.py") == found


def test_only_nvml_imports_pynvml():
    """Exactly one module imports NVIDIA's binding, and not when it is imported itself."""
    importers = [path for path in MODULES if "pynvml" in top(all_imports(path.read_text(), path))]
    assert [dotted(path) for path in importers] == ["_record.nvml"]
    assert "pynvml" not in top(imports_at_import(importers[0].read_text(), importers[0]))


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("_columns/x.py", "from .._model import tree", ["_model", "_model.tree"]),
        ("_columns/x.py", "def f():\n    import otel_torchprof._native.ffi", ["_native.ffi"]),
        ("_model/x.py", "from ..profiler import profile", ["profiler", "profiler.profile"]),
        ("_model/x.py", "from .. import legacy", ["legacy"]),
        ("errors.py", "from . import _columns", ["_columns"]),
        ("_model/x.py", "from ..errors import TorchProfError\nfrom . import tree\nimport numpy", []),
        ("profiler.py", "from ._export import file\nfrom .legacy import profile", []),
    ],
)
def test_the_check_finds_backward_imports(module, source, found):
    """The check sees relative, absolute and local imports, and lets leftward ones pass."""
    assert backward_imports(source, PACKAGE / module) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn", True),
        ("try:\n    from torch import nn\nexcept ImportError:\n    pass", True),
        ("class A:\n    import torch", True),
        ("def f():\n    import torch", False),
        ("if TYPE_CHECKING:\n    import torch", False),
    ],
)
def test_the_check_tells_module_level_from_local(source, found):
    """Imports that run with the module count, those in functions and for type checkers do not."""
    assert ("torch" in top(imports_at_import(source, PACKAGE / "x.py"))) is found


def test_importing_the_package_imports_neither_torch_nor_grpc_nor_pynvml():
    """`import otel_torchprof` in a fresh interpreter loads no torch, no gRPC and no NVML, and warns of nothing."""
    program = "import sys, otel_torchprof; print(*sorted({'torch', 'grpc', 'pynvml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_only_one_module_takes_threads_and_locks_from_python():
    """Nothing else makes a thread, a lock or a wait of ``threading``'s, ``queue``'s or ``time``'s, which gevent and eventlet replace.

    A source may have a function of these in hand, to record its calls.
    """
    made = {
        "Condition",
        "Event",
        "Lock",
        "RLock",
        "Semaphore",
        "SimpleQueue",
        "Queue",
        "Thread",
        "Timer",
        "get_ident",
        "local",
        "sleep",
    }
    found = [
        f"{dotted(path)}: {node.value.id}.{node.attr}"
        for path in MODULES
        if dotted(path) != "_process.threads"
        for called in ast.walk(parsed(path.read_text()))
        for node in [called.func if isinstance(called, ast.Call) else called]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in made
        if node.value.id in {"_thread", "queue", "threading", "time"}
        if node.attr != "sleep" or isinstance(called, ast.Call)
    ]
    allowed = {"_record.carrying: threading.Thread", "_record.step_marks: threading.Thread"}
    allowed |= {
        "_native.recorder: threading.Thread",
        "_files.box: threading.Thread",
        "_process.process_changes: threading.Lock",
        "_process.process_changes: threading.RLock",
    }
    assert set(found) <= allowed
    taken = {
        dotted(path)
        for path in MODULES
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in {"threading", "queue", "_thread"}
    }
    assert taken == {"_process.threads"}


def test_only_one_module_is_called_at_forks_and_at_exit():
    """What happens then, and in which order, is read in one place."""
    found = {
        dotted(path)
        for path in MODULES
        for node in ast.walk(parsed(path.read_text()))
        if (isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in {"atexit", "os.register_at_fork"})
        or (isinstance(node, ast.ImportFrom) and node.module == "atexit")
    }
    assert found == {"_process.process_changes"}
