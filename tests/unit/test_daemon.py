"""Programs that close all descriptors to become daemons, in the middle of a trace."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import forked_programs
import pytest
from forked import LONG

PROGRAM = """
import os, sys
import otel_torchprof as otp
from opentelemetry.sdk.trace import TracerProvider

provider = TracerProvider(shutdown_on_exit=False)
exporter = {exporter}
processor = otp.TorchSpanProcessor(exporter, schedule_delay_millis=3_600_000)
provider.add_span_processor(processor)
otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="ops", gpu_metrics=False, skip_dep_check=True)

def work(name):
    with otp.record_function(name):
        pass
    return provider.force_flush()

assert work("before")
{between}
os.closerange(3, 256)
victims = [os.open("victim", os.O_RDWR) for _ in range(20)]
print(work("after"))
otp.TorchInstrumentor().uninstrument()
provider.shutdown()
print(sum(queue.failed_spans for queue in processor.health.exporters.values()), exporter.path)
for victim in victims:
    assert os.lseek(victim, 0, os.SEEK_CUR) == 0
sys.stdout.flush()
os._exit(0)
"""
EXPORTERS = {
    "chrome": "otp.ChromeTraceExporter('t.json')",
    "chrome, compressed": "otp.ChromeTraceExporter('t.json.gz')",
    "chrome, rotated": "otp.ChromeTraceExporter('t.json', max_bytes='1M')",
    "otlp": "otp.OTLPFileExporter('t.otlp')",
    "otlp, rotated": "otp.OTLPFileExporter('t.jsonl', max_bytes='1M')",
}
FORK = """
if os.fork():
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    os._exit(0)
os.setsid()
work("child")
"""


def run(folder, exporter: str, between: str = "") -> tuple[list[str], str]:
    """What the program prints and logs; its own file is as it was."""
    (folder / "victim").write_bytes(b"precious" * 10_000)
    program = PROGRAM.format(exporter=EXPORTERS[exporter], between=between)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-W", "ignore", "-c", program]
    done = forked_programs.run(arguments, env=environ, cwd=folder, check=True, timeout=LONG)
    assert (folder / "victim").read_bytes() == b"precious" * 10_000
    return done.stdout.splitlines(), done.stderr


def text_of(path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_trace_goes_on_after_all_descriptors_were_closed(exporter, tmp_path):
    """The exporter opens its file anew; what the program has opened since then, under the same number, is not touched."""
    (flushed, rest), log = run(tmp_path, exporter)
    failed, _, path = rest.partition(" ")
    assert (flushed, failed, log) == ("True", "0", "")
    assert b"before" in text_of(tmp_path / path)
    assert b"after" in text_of(tmp_path / path)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_daemon(exporter, tmp_path):
    """Forked, its own file begun, all descriptors closed: the child's file has all that is the child's, the parent's the rest."""
    (flushed, rest, status), log = run(tmp_path, exporter, FORK)
    failed, _, path = rest.partition(" ")
    assert (flushed, failed, status, log) == ("True", "0", "0", "")
    childs = text_of(tmp_path / path)
    assert (b"before" in childs, b"child" in childs, b"after" in childs) == (False, True, True)
    (parents,) = {found.name for found in tmp_path.iterdir()} - {"victim", Path(path).name}
    assert b"before" in text_of(tmp_path / parents)


def test_where_the_path_leads_elsewhere_the_loss_is_counted_and_said(tmp_path):
    """A trace that was deleted meanwhile is not begun anew in somebody else's name: its spans are failed, with the reason."""
    (flushed, rest), log = run(tmp_path, "chrome", "os.unlink('t.json')")
    assert flushed == "False"
    assert int(rest.partition(" ")[0]) > 0
    assert "other code closed its descriptor" in log
    assert "make exporters after" in log
    assert not (tmp_path / "t.json").exists()
