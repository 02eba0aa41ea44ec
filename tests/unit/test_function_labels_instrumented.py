"""Functions that a file lists, under the instrumentation, which begins before the script has defined any."""

from __future__ import annotations

import logging
import sys

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_torchprof as otp
from otel_torchprof._record import function_labels
from otel_torchprof.errors import forget_warnings


def test_what_the_script_defines_after_the_instrumentation_has_begun(tmp_path, monkeypatch, caplog):
    """A script's functions are labelled once they are there; what it never defines is warned of at the end, once."""
    monkeypatch.setenv("OTEL_TORCHPROF_LABELS", str(tmp_path / "labels.txt"))
    (tmp_path / "labels.txt").write_text("__main__:defined_later later\n__main__:never\n__main__:Never.more\n")
    exporter = InMemorySpanExporter()
    processor, provider = otp.TorchSpanProcessor(exporter), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="modules", skip_dep_check=True)
        try:
            (note,) = (note for note in processor.health.notes if str(tmp_path) in note)
            assert "__main__:defined_later" in note
            script = sys.modules["__main__"]
            monkeypatch.setattr(script, "defined_later", lambda: None, raising=False)
            provider.force_flush()
            script.defined_later()
            assert not any("__main__:defined_later" in note for note in processor.health.notes)
            assert not caplog.records
        finally:
            otp.TorchInstrumentor().uninstrument()
            function_labels._of_environment.popitem()[1].remove()
            forget_warnings()
    provider.shutdown()
    assert [span.name for span in exporter.get_finished_spans()] == ["later"]
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition("; ")[0] for text in said] == [
        f"{tmp_path / 'labels.txt'}:{line} cannot be labelled: __main__ has no {name}"
        for line, name in (("2: '__main__:never'", "never"), ("3: '__main__:Never.more'", "Never"))
    ]
