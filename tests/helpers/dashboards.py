"""The dashboards of examples/observability, and the names that Prometheus gives to metrics that it gets by OTLP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "observability"
BOARDS = ("training", "ranks", "one-step")
RULES = EXAMPLE / "rules.yaml"

_UNITS = {"s": "seconds", "By": "bytes", "W": "watts", "J": "joules", "Cel": "celsius"}


def board(name: str) -> dict[str, Any]:
    """One dashboard."""
    return json.loads((EXAMPLE / "grafana" / "dashboards" / f"{name}.json").read_text("utf-8"))


def _queries(key: str, boards: tuple[str, ...] = BOARDS) -> Iterator[tuple[str, str]]:
    for name in boards:
        for panel in board(name)["panels"]:
            for target in panel.get("targets", []):
                if key in target:
                    yield f"{panel['title']} {target['refId']}", target[key]


def promql(*boards: str, **variables: str) -> list[tuple[str, str]]:
    """Panel and expression of every query of the boards (all) to Prometheus, with variables: ``job="training"`` for ``$job``."""
    return [(panel, _with(expression, variables)) for panel, expression in _queries("expr", boards or BOARDS)]


def rules() -> list[tuple[str, str]]:
    """Name and expression of every rule: what it records, or the alert that it raises."""
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [(rule.get("record") or rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def documented_traceql() -> list[tuple[str, str]]:
    """Page and query of those that the documentation shows: lines of blocks, each a query."""
    pages = [*sorted((EXAMPLE.parents[1] / "docs").glob("*.md")), EXAMPLE / "README.md"]
    return [
        (page.name, line.strip())
        for page in pages
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("{ ")
    ]


def traceql(**variables: str) -> list[tuple[str, str]]:
    """The same of every query to Tempo."""
    return [(panel, _with(query, variables)) for panel, query in _queries("query")]


def _with(query: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        query = query.replace(f"${name}", value)
    return query


def prometheus_name(metric: str, unit: str, kind: str) -> str:
    """What Prometheus calls a metric (UnderscoreEscapingWithSuffixes): unit behind it, then what kind it is of."""
    words = [re.sub(r"\W", "_", metric), _UNITS.get(unit, "")]
    if kind == "gauge" and unit == "1":
        words.append("ratio")
    if kind == "counter":
        words.append("total")
    return "_".join(word for word in words if word)
