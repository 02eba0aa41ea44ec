"""Examples in the docstrings of the public names run."""

from __future__ import annotations

import doctest
import inspect
import os

import pytest
import torch
from retired_words import retired_in

import otel_torchprof as otp
from otel_torchprof import integrations

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PUBLIC = {
    **{name: otp for name in otp.__all__ if not name.startswith("_")},
    **dict.fromkeys(integrations.__all__, integrations),
}
"""The module of each public name."""
MIRRORS = {
    "load_nvprof": "torch's own name; reads files that only nvprof writes, on an NVIDIA GPU",
    "parse_nvprof_trace": "torch's own name; as load_nvprof",
}
"""Names without an example that runs, and the reason."""


def public(name):
    """The object of a public name; skips the test where the framework of an adapter is not installed."""
    try:
        return getattr(PUBLIC[name], name)
    except ImportError as error:
        pytest.skip(str(error))


def doctests_of(name):
    """The doctests of an object, of its members, and of those that it inherits from classes of this package."""
    found = public(name)
    own = (
        [each for each in inspect.getmro(found) if each.__module__.startswith("otel_torchprof")]
        if isinstance(found, type)
        else [found]
    )
    finder = doctest.DocTestFinder()
    return [test for each in own for test in finder.find(each, name, globs={"otp": otp, "torch": torch})]


@pytest.fixture
def _clean_process(tmp_path, monkeypatch):
    """A folder for files, no settings of OpenTelemetry, and nothing that an example leaves behind."""
    for variable in os.environ:
        if variable.startswith("OTEL_") and "BUILD_DIR" not in variable:
            monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    tracker = torch.autograd.profiler.KinetoStepTracker
    monkeypatch.setattr(tracker, "_current_step", tracker._current_step)
    yield
    if otp.TorchInstrumentor().is_instrumented_by_opentelemetry:
        otp.TorchInstrumentor().uninstrument()


@pytest.mark.usefixtures("_clean_process")
@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name):
    """Every example in the docstrings of a public name gives the output that it shows."""
    said = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    failed = sum(runner.run(test, out=said.append).failed for test in doctests_of(name))
    assert not failed, "".join(said)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    """Every public class and function has an example that runs, but exceptions and a few of torch's own names."""
    found = public(name)
    if isinstance(found, type) and issubclass(found, BaseException):
        return
    examples = [example for test in doctests_of(name) for example in test.examples]
    assert any(not example.options.get(doctest.SKIP) for example in examples) == (name not in MIRRORS)


@pytest.mark.parametrize("name", PUBLIC)
def test_words_are_those_of_the_field(name):
    """No docstring of a public name, or of its members, has a word that readers of PyTorch and OpenTelemetry would have to learn."""
    found = public(name)
    members = list(vars(found).values()) if isinstance(found, type) else []
    texts = [text for each in (found, *members) if isinstance(text := getattr(each, "__doc__", None), str)]
    assert [word for text in texts for word in retired_in(text)] == []
