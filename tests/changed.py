"""Prints the test files that a change concerns: those that changed, and those that import a module which did.

Compared with a commit, HEAD by default, whatever is not committed yet included; for `make check`. A change of native code, of shared
code of tests or of what is installed concerns all of them, which is said on standard error, as it is of pages, scripts and what no test
imports: that is for `make test`.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "otel_torchprof"
_CONCERNS_ALL = ("native/", "requirements/", "tests/helpers/", "tests/conftest.py", "pyproject.toml", "setup.py")


def changed(since: str) -> list[str]:
    """Paths that differ from a commit, and new ones, without deleted ones."""
    commands = (["git", "diff", "--name-only", since], ["git", "ls-files", "--others", "--exclude-standard"])
    lines = [subprocess.run(each, cwd=ROOT, check=True, capture_output=True, text=True).stdout for each in commands]
    return [path for path in "".join(lines).splitlines() if (ROOT / path).exists()]


@functools.cache
def imported(path: Path) -> set[str]:
    """Dotted names of what a file imports, of names from a module both the module and the name in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def concerned(paths: list[str]) -> list[str]:
    """The test files that these paths concern, in order."""
    modules = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in paths
        if path.startswith(f"{PACKAGE}/")
    }
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    names = {test: test.relative_to(ROOT).as_posix() for test in tests}
    return [names[test] for test in tests if names[test] in paths or modules & imported(test)]


def main() -> int:
    """Prints them, one on a line; of what else has changed, that no test imports it."""
    paths = changed(sys.argv[1] if len(sys.argv) > 1 else "HEAD")
    for path in paths:
        if not path.startswith(("tests/", *_CONCERNS_ALL)) and not concerned([path]):
            sys.stderr.write(f"{path}: no test imports it, so none was chosen for it: make test\n")
    if everything := [path for path in paths if path.startswith(_CONCERNS_ALL)]:
        sys.stderr.write(f"{everything[0]} concerns all tests: make test\n")
    sys.stdout.write("".join(f"{path}\n" for path in concerned(paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
