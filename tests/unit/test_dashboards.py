"""examples/observability: the dashboards ask for metrics that there are, and say so in a form that Grafana takes."""

from __future__ import annotations

import re
from unittest.mock import MagicMock

import pytest
from dashboards import BOARDS, board, documented_traceql, prometheus_name, promql, rules, traceql

from otel_torchprof._encode import phase_attributes
from otel_torchprof._encode.attributes import ATTRIBUTES, REDUCTIONS
from otel_torchprof._instrument.gpu_metrics import METRICS
from otel_torchprof._instrument.operator_metrics import GenerationMetrics, TorchMetrics
from otel_torchprof._model.request_spans import REQUESTS
from otel_torchprof._model.span_table import AttributeType

COLLECTORS_OWN = re.compile(r"otelcol_(receiver|exporter)_\w+")


def exported() -> set[str]:
    """The names under which Prometheus has what we measure."""
    meter = MagicMock()
    TorchMetrics(meter, GenerationMetrics(meter, bool))
    made = {(metric.name, metric.unit, metric.kind) for metric in METRICS.values()}
    for how, (metric, *more), options in meter.method_calls:
        kind = how.removeprefix("create_").removeprefix("observable_")
        made.add((metric, options.get("unit") or more[0], kind))
    return {prometheus_name(*metric) for metric in made}


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (("torch.step.duration", "s", "histogram"), "torch_step_duration_seconds"),
        (("torch.steps", "{step}", "counter"), "torch_steps_total"),
        (("otel_torchprof.overhead", "1", "gauge"), "otel_torchprof_overhead_ratio"),
        (("hw.status", "1", "updowncounter"), "hw_status"),
        (("hw.temperature", "Cel", "gauge"), "hw_temperature_celsius"),
        (("hw.energy", "J", "counter"), "hw_energy_joules_total"),
    ],
)
def test_names_are_those_of_prometheus(metric, name):
    """The names that the test below goes by are what Prometheus 3.5 was seen to make of these metrics by OTLP."""
    assert prometheus_name(*metric) == name


def test_every_metric_is_one_that_there_is():
    """No panel, no variable and no rule asks for a metric that nothing exports."""
    there = exported()
    asked = {metric for _, expression in (*promql(), *rules()) for metric in metrics_in(expression)}
    unknown = {name for name in asked if re.sub("_(bucket|count|sum)$", "", name) not in there}
    assert {name for name in unknown if not COLLECTORS_OWN.fullmatch(name)} == set()
    assert len(asked & there) > 15


def test_every_recorded_series_is_one_that_there_is():
    """What panels and rules ask for of recording rules, a rule before them records."""
    recorded: set[str] = set()
    for name, expression in rules():
        assert set(re.findall(r"\w+:\w+:\w+", expression)) <= recorded, name
        recorded |= {name} if ":" in name else set()
    asked = {series for _, expression in promql() for series in re.findall(r"\w+:\w+:\w+", expression)}
    assert asked <= recorded
    assert len(asked) > 4


def metrics_in(expression: str) -> set[str]:
    """Names with braces or a range behind them, and those that the test would otherwise overlook."""
    return set(re.findall(r"\b((?:torch|otel|hw|otelcol)_\w+)(?=[{\[])", expression))


@pytest.mark.parametrize("name", BOARDS)
def test_panels_have_places_of_their_own(name):
    """Panels have different ids, lie within the 24 columns, and none covers another."""
    panels = board(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("name", BOARDS)
def test_every_variable_is_defined(name):
    """What a query or a link takes from a variable is a variable of the dashboard, or one of Grafana's."""
    found = board(name)
    defined = {variable["name"] for variable in found["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", str(found["panels"]) + str(found["links"])))
    assert {each for each in used if not each.startswith("__")} <= defined


def test_links_lead_to_dashboards_that_there_are():
    """Where a dashboard links to another one it says the id that this one has."""
    links = {link for name in BOARDS for link in re.findall(r"/d/([\w-]+)", str(board(name)))}
    assert links == {board(name)["uid"] for name in BOARDS}


def test_every_attribute_is_one_that_there_is():
    """What queries to Tempo say of spans are attributes of the table in docs/spans.md."""
    asked = {name for _, query in traceql() for name in re.findall(r"span\.([\w.]+)", query)}
    assert len(asked) > 10
    assert asked <= {attribute.key for attribute in ATTRIBUTES} | {key for key, *_ in (*REDUCTIONS, *REQUESTS)}
    assert len(documented_traceql()) > 5


QUERIES = [*traceql(), *documented_traceql()]


def type_of(attribute: str) -> AttributeType:
    """What the table in docs/spans.md says."""
    types = {a.key: a.type for a in ATTRIBUTES} | {
        key: kind for key, kind, *_ in (*REDUCTIONS, *phase_attributes.SEGMENTS, *REQUESTS)
    }
    return types[attribute] if attribute in types else types[re.sub(r"(?<=phase\.)\w+", "<name>", attribute)]


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_queries_find_what_they_ask_for(where, query):
    """Floats are compared with float literals, quantiles are of durations, and a step is no root of a part: else Tempo finds nothing, or too much."""
    for attribute, literal in re.findall(r"span\.([\w.]+)\s*[<>=!]=?~?\s*([^\s}|)]+)", query):
        is_double = type_of(attribute) == AttributeType.DOUBLE
        assert literal == "nil" or bool(re.fullmatch(r"-?(\d+\.\d*|\.\d+)", literal)) == is_double, attribute
    for measured in re.findall(r"(?:quantile|histogram)_over_time\((\S+?)[,)]", query):
        assert measured == "duration"
    if 'torch.step"' in query and "trace:id" not in query:
        assert "span.torch.part = nil" in query


def test_slow_steps_and_traces_are_asked_for():
    """There are TraceQL queries for captured steps, and for the spans of the step whose trace is shown."""
    queries = [query for _, query in traceql()]
    assert any('name = "torch.step" && span.torch.part = nil && duration > $slow' in query for query in queries)
    assert sum('trace:id = "$trace"' in query for query in queries) > 3
