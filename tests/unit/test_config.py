"""Settings from the environment."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from otel_torchprof import config
from otel_torchprof.errors import forget_warnings
from otel_torchprof.parsers import BlackBoxOptions


@pytest.fixture(autouse=True)
def _warned_of_nothing():
    forget_warnings()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("true", True),
        ("TRUE", True),
        ("1", True),
        ("", True),
        (" on ", True),
        ("false", False),
        ("0", False),
        ("Off", False),
    ],
)
def test_enabled(monkeypatch, value, expected):
    """The usual ways to say yes and no are understood, in any case."""
    monkeypatch.setenv("OTEL_TORCHPROF_ENABLED", value)
    assert config.ENABLED.read() is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", 512 << 20), ("65536", 65536), ("64k", 64 << 10), ("10M", 10 << 20), (" 2g ", 2 << 30)],
)
def test_memory_limit(monkeypatch, value, expected):
    """Bytes, K, M and G are understood."""
    monkeypatch.setenv("OTEL_TORCHPROF_MEMORY_LIMIT", value)
    assert config.MEMORY_LIMIT.read() == expected


@pytest.mark.parametrize("value", ["0", "-1", "1.5M", "M", "12T", "²", "lots", "1e9"])
def test_a_bad_memory_limit_is_warned_of_once(monkeypatch, caplog, value):
    """A value that is none is ignored, with one warning that names variable, value and what is allowed."""
    monkeypatch.setenv("OTEL_TORCHPROF_MEMORY_LIMIT", value)
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        assert [config.MEMORY_LIMIT.read() for _ in range(3)] == [config.MEMORY_LIMIT.fallback] * 3
    (record,) = caplog.records
    assert "OTEL_TORCHPROF_MEMORY_LIMIT" in record.getMessage()
    assert repr(value) in record.getMessage()
    assert "K, M or G" in record.getMessage()


def test_a_bad_switch_is_warned_of_once(monkeypatch, caplog):
    """A switch that says neither yes nor no is ignored, with one warning."""
    monkeypatch.setenv("OTEL_TORCHPROF_ENABLED", "maybe")
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        assert config.ENABLED.read()
        assert config.ENABLED.read()
    assert ["'maybe'" in record.getMessage() for record in caplog.records] == [True]


def test_build_dir(monkeypatch):
    """The folder may begin with a tilde; empty means none."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", "~/kept")
    assert config.BUILD_DIR.read() == Path("/home/somebody/kept")
    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", "  ")
    assert config.BUILD_DIR.read() is None


@pytest.mark.parametrize(
    ("text", "path", "most"),
    [
        ("t.json", "t.json", None),
        ("t.json, max_files = 3", "t.json", 3),
        ("max_files=3", config.CHROME_TRACE.fallback, 3),
        ("lr=0.1.json,max_files=3", "lr=0.1.json", 3),
        ("out/lr=0.1,bs=32.json,max_files=3,", "out/lr=0.1,bs=32.json", 3),
        ("t.json,max_file=3", "t.json", None),
        ("max_file=3", config.CHROME_TRACE.fallback, None),
        ("t.json,max_files=", "t.json", None),
    ],
)
def test_a_variable_with_parts(monkeypatch, text, path, most):
    """What stands before the first key is the value, commas and all; what is like a key and none is no part of it."""
    monkeypatch.setenv("OTEL_TORCHPROF_CHROME_TRACE", text)
    assert config.CHROME_TRACE.read() == path
    assert config.CHROME_MAX_FILES.read() == most


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("ops", BlackBoxOptions("ops")),
        (" Steps ", BlackBoxOptions("steps")),
        ("ops,/scratch/boxes", BlackBoxOptions("ops", "/scratch/boxes")),
        ("ops, 32m", BlackBoxOptions("ops", size=32 << 20)),
        ("steps,1M,~/my boxes", BlackBoxOptions("steps", "~/my boxes", 1 << 20)),
        ("ops,./boxes,1G", BlackBoxOptions("ops", "./boxes", 1 << 30)),
        ("ops,hang=1.5,2M", BlackBoxOptions("ops", size=2 << 20, hang=1.5)),
        ("steps,exit,hang=60", BlackBoxOptions("steps", hang=60, exits=True)),
    ],
)
def test_a_black_box(monkeypatch, text, expected):
    """What it records, then in any order a folder, which has a slash, a size, and after how many seconds a thread hangs."""
    monkeypatch.setenv("OTEL_TORCHPROF_BLACKBOX", text)
    assert config.BLACK_BOX.read() == expected
    assert config.BLACK_BOX.given(expected) == expected


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("on", "allowed is steps or ops,"),
        ("/scratch/boxes", "allowed is steps or ops,"),
        ("ops,boxes", "allowed is steps or ops,"),
        ("ops,", "allowed is steps or ops,"),
        ("ops,/a,/b", "allowed is steps or ops,"),
        ("ops,16M,32M", "allowed is steps or ops,"),
        ("ops,hang=1,hang=2", "allowed is steps or ops,"),
        ("ops,hang=0", "allowed is hang= with seconds above 0"),
        ("ops,exit", "allowed is exit with hang="),
        ("ops,1023K", "allowed is a size from 1M to 1G"),
        ("ops,2G", "allowed is a size from 1M to 1G"),
    ],
)
def test_a_bad_black_box_is_warned_of(monkeypatch, caplog, text, allowed):
    """It is ignored with one warning that names variable, value and what is allowed; the same text as a keyword raises."""
    monkeypatch.setenv("OTEL_TORCHPROF_BLACKBOX", text)
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        assert [config.BLACK_BOX.read() for _ in range(2)] == [None, None]
    (record,) = caplog.records
    assert all(part in record.getMessage() for part in ("OTEL_TORCHPROF_BLACKBOX", repr(text), allowed))
    with pytest.raises(ValueError, match=f"^blackbox is {text!r}; {allowed}"):
        config.BLACK_BOX.given(text)


def test_labels_in_a_black_box(monkeypatch):
    """Nothing set shows all labels, a list of patterns those alone."""
    assert config.BLACK_BOX_LABELS.read() is None
    monkeypatch.setenv("OTEL_TORCHPROF_BLACKBOX_LABELS", "forward*, load")
    assert config.BLACK_BOX_LABELS.read() == {"forward*", "load"}
