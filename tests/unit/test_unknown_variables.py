"""Variables that nobody reads: the misspelt ones are named with what is meant, and no right one ever is."""

from __future__ import annotations

import pytest
from opentelemetry.sdk import environment_variables

from otel_torchprof import config
from otel_torchprof._export.unknown_variables import _SPECIFIED, standard_names, unknown_variables
from otel_torchprof.parsers import nearest


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPIONT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ("OTEL_EXPORTER_OTLP_PROTOCAL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ("OTEL_EXPORTER_OTLP_TRACE_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
        ("OTEL_TRACE_EXPORTER", "OTEL_TRACES_EXPORTER"),
        ("OTEL_METRICS_EXPORT_INTERVAL", "OTEL_METRIC_EXPORT_INTERVAL"),
        ("OTEL_PYTHON_DISABLED_INSTRUMENTATION", "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"),
        ("OTEL_TORCHPROF_DETIAL", "OTEL_TORCHPROF_DETAIL"),
        ("OTEL_TORCHPROF_POLICY_EVRY", "OTEL_TORCHPROF_POLICY=every=..."),
        ("OTEL_TORCHPROF_MAX_SPANS", "OTEL_TORCHPROF_POLICY=max_spans=..."),
        ("OTEL_TROCHPROF_DETAIL", "OTEL_TORCHPROF_DETAIL"),
        ("OTEL_TORCPROF_DETIAL", "OTEL_TORCHPROF_DETAIL"),
        ("OTEL_TORCHPROFILER_DETAIL", "OTEL_TORCHPROF_DETAIL"),
        ("OTEL_TORCH_PROF_DETAIL", "OTEL_TORCHPROF_DETAIL"),
        ("OTEL_EXPORTER_OTLP_LOGS_ENDPIONT", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"),
        ("OTEL_LOGS_EXPORTERS", "OTEL_LOGS_EXPORTER"),
        ("OTEL_TORCHPROF_CACHE", ""),
        ("OTEL_TORCHPROF_X", ""),
    ],
)
def test_what_may_be_meant(name, meant):
    """A variable that is near is proposed, or the part of one that somebody took for a variable; nothing where none is near."""
    (found,) = unknown_variables({name: "1"})
    assert (found.name, found.hint) == (name, meant and f"did you mean {meant}?")


def test_right_ones_are_never_named():
    """What OpenTelemetry specifies, what its SDK for Python reads besides, what this package reads, and what is like none of these."""
    read = {name for name in vars(environment_variables) if name.startswith("OTEL_")}
    ours = {option.variable for option in config.OPTIONS if option.variable}
    others = {
        "OTEL_VENDOR_ACCESS",
        "OTEL_TORCHPROFX_ACCESS",
        "OTEL_EXPORTER_JAEGER_ENDPOINT",
        "OTEL_PROFILES_EXPORTER",
        "OTEL_JAVAAGENT_ENABLED",
        "OTEL_SERVICE_NAMESPACE",
        "OTEL_NODE_RESOURCE_DETECTORS",
        "HOME",
    }
    assert unknown_variables(dict.fromkeys(_SPECIFIED | standard_names() | read | ours | others, "1")) == []


def test_links_to_services():
    """What Kubernetes sets for a Service of a name like ours is no mistake; without a Service it is one."""
    links = {
        *("OTEL_TORCHPROF_SERVICE_HOST", "OTEL_TORCHPROF_SERVICE_PORT", "OTEL_TORCHPROF_SERVICE_PORT_OTLP_GRPC"),
        *("OTEL_TORCHPROF_PORT", "OTEL_TORCHPROF_PORT_4317_TCP"),
        *(f"OTEL_TORCHPROF_PORT_4317_TCP_{part}" for part in ("ADDR", "PORT", "PROTO")),
    }
    others = {name.replace("TORCHPROF", "COLLECTOR") for name in links}
    assert unknown_variables(dict.fromkeys(links | others, "1")) == []
    wrong = [each.name for each in unknown_variables({**dict.fromkeys(links, "1"), "OTEL_TORCHPROF_PORTS": "1"})]
    assert wrong == ["OTEL_TORCHPROF_PORTS"]
    assert [each.name for each in unknown_variables({"OTEL_TORCHPROF_PORT": "1"})] == ["OTEL_TORCHPROF_PORT"]


def test_the_list_is_that_of_the_specification():
    """All that the installed SDK reads and that is neither Python's own nor an experiment is in it."""
    read = {name for name in vars(environment_variables) if name.startswith("OTEL_")}
    assert {name for name in read - _SPECIFIED if not name.startswith(("OTEL_PYTHON_", "OTEL_EXPERIMENTAL_"))} == set()


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("detial", "detail"),
        ("detai", "detail"),
        ("details", "detail"),
        ("dateil", "detail"),
        ("datiel", ""),
        ("energie", "energy"),
        ("op", ""),
        ("", ""),
    ],
)
def test_what_is_near(word, found):
    """Two mistakes at most, one in a word under six letters, none in one under three; two letters exchanged are one."""
    assert nearest(word, ("detail", "energy", "ops", "o")) == found
