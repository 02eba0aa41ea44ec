"""docs/api.md has the public names."""

from __future__ import annotations

import re
from pathlib import Path

import otel_torchprof
from otel_torchprof import integrations

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def test_api_page_has_every_public_name():
    """Each name of ``__all__``, of the package and of its adapters, is there once, and no other."""
    public = [f"{module.__name__}.{name}" for module in (otel_torchprof, integrations) for name in module.__all__]
    assert sorted(re.findall(r"^::: (\S+)$", PAGE.read_text(), re.MULTILINE)) == sorted(public)
