"""Adapters for frameworks are found by name, and import nothing before."""

from __future__ import annotations

import subprocess
import sys

import pytest

from otel_torchprof import integrations

FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "torchtitan", "transformers")


def test_importing_the_package_imports_no_framework():
    """Frameworks take seconds to import: only the name of an adapter does."""
    program = (
        "import sys, otel_torchprof.integrations as found; dir(found); "
        f"print(*sorted({{'torch', *{FRAMEWORKS!r}}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_a_framework_that_is_missing_is_named(monkeypatch):
    """An adapter without its framework says which extra installs it."""
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "otel_torchprof.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'otel-torchprof\[torchtitan\]'"):
        integrations.TorchTitanProfiler  # noqa: B018 - asking is what raises


def test_other_names_are_not_there():
    """A name that is no adapter's is an AttributeError, as with any module."""
    with pytest.raises(AttributeError, match="'Keras'"):
        integrations.Keras  # noqa: B018 - asking is what raises
    assert set(integrations.__all__) <= set(dir(integrations))
