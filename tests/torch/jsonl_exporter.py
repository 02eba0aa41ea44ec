"""An exporter that several processes can use at once: one file per process, a JSON object per span."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


class JsonLinesExporter(SpanExporter):
    """Appends to ``<folder>/<pid>.jsonl``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    def export(self, spans) -> SpanExportResult:
        with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
            for span in spans:
                file.write(json.dumps(_fields(span)) + "\n")
        return SpanExportResult.SUCCESS


def _fields(span) -> dict[str, Any]:
    return {
        "name": span.name,
        "trace": span.context.trace_id,
        "span": span.context.span_id,
        "parent": span.parent.span_id if span.parent else 0,
        "attributes": dict(span.attributes),
        "links": [[link.context.trace_id, link.context.span_id] for link in span.links],
        "resource": {k: v for k, v in span.resource.attributes.items() if isinstance(v, str | int | tuple)},
    }


def read(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The spans of each process."""
    return {
        int(path.stem): [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")
    }
