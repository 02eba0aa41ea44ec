"""Layers import only leftwards, and importing the package stays cheap. Read from the sources, so that nothing slips by."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parent.parent / "otel_torchprof"
ORDER = ("errors", "config", "version", "_columns", "_native", "_model", "_encode", "_export")
"""Left to right; every other module is public and stands at the right end."""
FOUNDATION = ("errors", "config", "version")
BUILD_SCRIPT = PACKAGE / "_native" / "build.py"
"""Run by setuptools while the package is built, never imported by it: it reads the repository and needs cffi's compiler."""

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != BUILD_SCRIPT)


def rank(module: str) -> int:
    """Place of a module (dotted, without the package's name) in the order of layers."""
    layer = module.partition(".")[0]
    if layer in FOUNDATION:
        return 0
    return ORDER.index(layer) if layer in ORDER else len(ORDER)


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
    return [name for node in ast.walk(ast.parse(source)) for name in imported(node, path)]


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

    return [name for node in statements(ast.parse(source)) for name in imported(node, path)]


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


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_layers_import_only_leftwards(path):
    """No module imports from a layer to its right, at any place in its source."""
    assert backward_imports(path.read_text(), path) == []


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_torch_is_never_imported_at_module_level(path):
    """Torch is optional and slow to import: only functions that were asked for it import it."""
    assert "torch" not in top(imports_at_import(path.read_text(), path))


@pytest.mark.parametrize("compiled", ["_core", "_python"])
def test_only_ffi_imports_what_is_compiled(compiled):
    """Exactly one module imports each compiled one; everything else gets it from there, attached to the core."""
    name = f"otel_torchprof._native.{compiled}"
    assert [dotted(path) for path in MODULES if name in all_imports(path.read_text(), path)] == ["_native.ffi"]


def test_only_nvml_imports_pynvml():
    """Exactly one module imports NVIDIA's binding, and not when it is imported itself."""
    importers = [path for path in MODULES if "pynvml" in top(all_imports(path.read_text(), path))]
    assert [dotted(path) for path in importers] == ["_nvml"]
    assert "pynvml" not in top(imports_at_import(importers[0].read_text(), importers[0]))


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("_columns/x.py", "from .._model import tree", ["_model", "_model.tree"]),
        ("_columns/x.py", "def f():\n    import otel_torchprof._native.ffi", ["_native.ffi"]),
        ("_model/x.py", "from ..profiler import profile", ["profiler", "profiler.profile"]),
        ("_model/x.py", "from .. import labels", ["labels"]),
        ("errors.py", "from . import _columns", ["_columns"]),
        ("_model/x.py", "from ..errors import TorchProfError\nfrom . import tree\nimport numpy", []),
        ("profiler.py", "from ._export import file\nfrom .labels import record_function", []),
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
