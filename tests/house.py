"""`make house`: how the package is laid out, in numbers. Read from the sources; nothing of it is imported."""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter
from typing import TYPE_CHECKING

from test_layers import MODULES, PACKAGE, arrows, backward_imports, cycles, dotted

if TYPE_CHECKING:
    from pathlib import Path

ROOT = PACKAGE.parent
_LONGEST = 5
_OWN_VARIABLE = re.compile(r"OTEL_TORCHPROF_[A-Z][A-Z_]*[A-Z]")


def functions() -> list[tuple[int, str]]:
    """Lines of every function, with its docstring and without its signature, and where it is; the longest first."""
    found = [
        ((node.end_lineno or 0) - node.body[0].lineno + 1, f"{dotted(path)}.{node.name}")
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sorted(found, reverse=True)


def lines(path: Path) -> int:
    """Of a file."""
    return len(path.read_text().splitlines())


def lines_below(folder: str, *suffixes: str) -> int:
    """Of all sources in a folder of the repository."""
    return sum(lines(path) for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def exported() -> int:
    """Names in ``otel_torchprof.__all__``."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def own_variables() -> int:
    """Environment variables of ours that the sources name."""
    return len({name for path in MODULES for name in _OWN_VARIABLE.findall(path.read_text())})


def main() -> None:
    """Prints it."""
    graph, long = arrows(), functions()
    back = sum(len(set(backward_imports(path.read_text(), path))) for path in MODULES)
    folders: Counter[str] = Counter()
    for path in MODULES:
        folders[path.parent.relative_to(PACKAGE).as_posix()] += lines(path)
    sizes = [size for size, _ in long]
    tangled = cycles(graph)
    files = sorted(((lines(path), dotted(path) or "__init__") for path in MODULES), reverse=True)
    native, tests = lines_below("native", ".cc", ".h"), lines_below("tests", ".py")
    report = {
        "modules at the top": f"{sum(path.parent == PACKAGE for path in MODULES)} of {len(MODULES)}",
        "lines": f"Python {lines_below('otel_torchprof', '.py')}, native {native}, tests {tests}",
        "lines per folder": ", ".join(f"{folder} {count}" for folder, count in sorted(folders.items())),
        "cycles": f"{len(tangled)}: {'; '.join(' '.join(group) for group in tangled)}",
        "arrows that run back": str(back),
        "lines of functions": f"p50 {statistics.median(sizes):.0f}, p90 {sizes[len(sizes) // 10]}, max {sizes[0]}",
        "longest functions": ", ".join(f"{name} {size}" for size, name in long[:_LONGEST]),
        "longest files": ", ".join(f"{name} {size}" for size, name in files[:_LONGEST]),
        "own variables": str(own_variables()),
        "exported names": str(exported()),
    }
    for what, figures in report.items():
        sys.stdout.write(f"{what:22}{figures}\n")


if __name__ == "__main__":
    main()
