"""Names of attributes and metrics: OpenTelemetry's where its conventions have one, ours in a namespace of their own."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pkgutil
import sys
from pathlib import Path
from unittest.mock import patch

import generated
import pytest
from fake_c10d import C10d, Store
from opentelemetry.metrics import NoOpMeter
from opentelemetry.semconv import attributes as stable_modules
from opentelemetry.semconv import metrics as stable_metrics
from opentelemetry.semconv._incubating import attributes as attribute_modules
from opentelemetry.semconv._incubating import metrics as metric_modules

from otel_torchprof._encode.attributes import ATTRIBUTES, REDUCTIONS
from otel_torchprof._encode.phase_attributes import SEGMENTS
from otel_torchprof._export.sdk import SCHEMA_URL
from otel_torchprof._instrument.gpu_metrics import METRICS
from otel_torchprof._instrument.operator_metrics import _made
from otel_torchprof._model.request_spans import REQUESTS
from otel_torchprof._ranks.ranks import Ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "names.md"
OURS = ("torch.", "otel_torchprof.")
LENS = ("nv.dl.", "dl.")
"""Names of NVIDIA's NeMo Lens, which are sent where they are asked for."""
ELSEWHERE = (*OURS, *LENS, "gen_ai.")
"""Names that are not in the conventions' main registry: those of generative AI have one of their own."""
REGISTRY = json.loads(Path(__file__).with_name("registry.json").read_text())
KEYS = [*(attribute.key for attribute in ATTRIBUTES), *(key for key, *_ in (*SEGMENTS, *REDUCTIONS, *REQUESTS))]


def published(package):
    """The names that the conventions' own modules have, each with its module."""
    modules = [
        importlib.import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)
    ]
    return {
        value: (module, name)
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }


class Noting(NoOpMeter):
    """Notes what is made: kind, unit."""

    def __init__(self):
        super().__init__("noting")
        self.made = {}

    def __getattribute__(self, name):
        if not name.startswith("create_"):
            return super().__getattribute__(name)
        kind = name.removeprefix("create_").removeprefix("observable_")

        signature = inspect.signature(super().__getattribute__(name))

        def create(*arguments, **keywords):
            given = signature.bind(*arguments, **keywords).arguments
            self.made[given["name"]] = kind, given.get("unit", "")

        return create


def our_metrics():
    """Kind and unit of each metric, but for those of GPUs."""
    meter = Noting()
    _made(lambda *_arguments, **_keywords: meter, lambda: True)
    return meter.made


def test_no_attribute_is_a_namespace():
    """None is the beginning of another with a dot after it, and none is there twice."""
    assert len(KEYS) == len(set(KEYS))
    assert [(key, other) for key in KEYS for other in KEYS if other.startswith(f"{key}.")] == []


@pytest.mark.parametrize("key", [key for key in KEYS if not key.startswith((*OURS, *LENS))])
def test_attributes_of_the_conventions(key):
    """Each is in OpenTelemetry's conventions, stable or in development; those of generative AI have moved to a repository of their own."""
    if key in published(stable_modules):
        return
    meaning = text_below(*published(attribute_modules)[key])
    assert "Deprecated" not in meaning or "Moved to the [OpenTelemetry GenAI" in meaning


def test_metrics_of_the_conventions():
    """Each that is not in a namespace of ours is in OpenTelemetry's conventions, with this kind and unit."""
    known = published(metric_modules)
    found = {name: what for name, what in our_metrics().items() if not name.startswith(OURS)}
    assert len(found) > 5
    for name, what in found.items():
        module, constant = known[name]
        meter = Noting()
        getattr(module, f"create_{constant.lower()}")(meter)
        assert meter.made == {name: what}


def text_below(module, constant):
    """What the conventions' module says of a constant: the text that stands below it."""
    body = ast.parse(inspect.getsource(module)).body
    place = next(at for at, node in enumerate(body) if getattr(getattr(node, "target", None), "id", "") == constant)
    return body[place + 1].value.value


def convention_of(name, stable):
    """Whose name it is, and how stable."""
    if name.startswith(OURS):
        return "this package | may change before 1.0"
    if name.startswith(LENS):
        return "NVIDIA, NeMo Lens | stable there"
    if name.startswith("gen_ai."):
        return "OpenTelemetry, generative AI | development"
    return f"OpenTelemetry | {'stable' if name in published(stable) else 'development'}"


def all_attributes():
    """Type of each attribute, in the registry's words."""
    words = {"INT64": "int", "DOUBLE": "double", "BOOL": "boolean", "NAME": "string"}
    types = {attribute.key: attribute.type for attribute in ATTRIBUTES}
    types |= {key: kind for key, kind, *_ in (*SEGMENTS, *REDUCTIONS, *REQUESTS)}
    return {key: words[types[key].name] for key in sorted(types)}


def all_resource_attributes():
    """Type of each attribute that a rank adds to a resource, in the registry's words."""
    words = {int: "int", str: "string", tuple: "string[]"}
    environ = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    process = C10d()
    process.init(1, 4, Store())
    process.add_group("1", "mesh_tp", (0, 1))
    ranks = Ranks(environ=environ)
    with patch.dict(sys.modules, {"torch.distributed.distributed_c10d": process}):
        ranks.look()
    with patch.dict(os.environ, {"OTEL_TORCHPROF_RANKS": "aliases=nemo_lens"}):
        return {key: words[type(value)] for key, value in sorted(ranks.attributes().items())}


def all_metrics():
    """Instrument, in the registry's words, and unit of each metric."""
    metrics = our_metrics() | {metric.name: (metric.kind, metric.unit) for metric in METRICS.values()}
    return {name: (kind.replace("_", ""), unit) for name, (kind, unit) in sorted(metrics.items())}


def test_attributes_are_those_of_the_published_registry():
    """Each that it has is of its type, and the page says its stability."""
    found = {
        key: {"type": kind, "stability": convention_of(key, stable_modules).rpartition(" | ")[2]}
        for key, kind in all_attributes().items()
        if not key.startswith(ELSEWHERE)
    }
    assert found == REGISTRY["attributes"]


def test_metrics_are_those_of_the_published_registry():
    """Each that it has, those of GPUs too, is its instrument with its unit, and the page says its stability."""
    found = {
        name: {
            "instrument": instrument,
            "unit": unit,
            "stability": convention_of(name, stable_metrics).rpartition(" | ")[2],
        }
        for name, (instrument, unit) in all_metrics().items()
        if not name.startswith(ELSEWHERE)
    }
    assert found == REGISTRY["metrics"]


def page():
    """The page that lists every name."""
    rows = [f"| `{key}` | {kind} | {convention_of(key, stable_modules)} |" for key, kind in all_attributes().items()]
    resource = [
        f"| `{key}` | {kind} | {convention_of(key, stable_modules)} |"
        for key, kind in all_resource_attributes().items()
    ]
    made = [
        f"| `{name}` | {instrument} | `{unit}` | {convention_of(name, stable_metrics)} |"
        for name, (instrument, unit) in all_metrics().items()
    ]
    return "\n".join(
        [
            "# Names and their conventions",
            "",
            "Every attribute and metric, with the convention that defines it. What has a name in OpenTelemetry's semantic",
            f"conventions (schema {SCHEMA_URL.rsplit('/', 1)[1]}) has that name. *development* is OpenTelemetry's word: such a",
            "name may change with a later schema. This page is generated from the tables in the code by",
            "`make generated`; tests compare them with OpenTelemetry's own modules and its published registry.",
            "",
            "## Attributes of spans",
            "",
            "What they mean: [spans](spans.md#attributes).",
            "",
            "| Attribute | Type | Convention | Stability |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            "## Attributes of resources",
            "",
            "What they mean: [ranks](ranks.md#find-a-ranks-spans-in-a-store).",
            "",
            "| Attribute | Type | Convention | Stability |",
            "| --- | --- | --- | --- |",
            *resource,
            "",
            "## Metrics",
            "",
            "What they mean: [metrics](metrics.md).",
            "",
            "| Metric | Instrument | Unit | Convention | Stability |",
            "| --- | --- | --- | --- | --- |",
            *made,
            "",
        ]
    )


def test_the_page_of_names_is_up_to_date():
    """docs/names.md lists what the tables in the code have."""
    generated.check(PAGE, page())
