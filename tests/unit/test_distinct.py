"""The different values of arrays, on threads that the end of the interpreter interrupts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import otel_torchprof
from otel_torchprof._columns.arrays import distinct_values


@given(
    arrays.arrays(
        st.sampled_from([np.dtype(kind) for kind in ("u8", "i8", "i4", "u1", "?")]),
        st.integers(min_value=0, max_value=20),
    )
)
def test_as_numpys(values):
    """They are what ``np.unique`` gives, of the same type."""
    found = distinct_values(values)
    np.testing.assert_array_equal(found, np.unique(values))
    assert found.dtype == values.dtype


AT_THE_END = """
import threading
import numpy as np
from otel_torchprof._columns.arrays import distinct_values
values = np.random.default_rng(0).integers(0, 1 << 40, 200_000).astype(np.uint64)
begun = threading.Barrier(3)

def work():
    begun.wait()
    while True:
        distinct_values(values)

for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize("again", range(3))
def test_threads_at_the_end_of_the_interpreter(again):
    """A process whose daemon threads look for different values when it ends, ends as any other."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), again


def test_numpys_is_called_where_it_sorts_only():
    """No module calls ``np.unique`` without asking for more than the values: it would be the one that may abort."""
    root = Path(otel_torchprof.__file__).parent
    called = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.unique"
        if not any(word.arg.startswith("return_") for word in node.keywords)
    ]
    assert called == []
