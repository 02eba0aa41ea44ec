"""A wall clock that is set forward and back by hours while a program records and sends."""

import shutil
import subprocess
import sys

import pytest
from frame_runs import HELPERS, run

PROGRAM = """
import ctypes, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
import otel_torchprof as otp
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

set_ahead = ctypes.CDLL(None).set_wall_clock_ahead
set_ahead.argtypes = [ctypes.c_int64]
HOURS = (3, -2, -40, 0, 100, -1)
received, requests = [], []

class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        set_ahead(3600 * HOURS[-1 - len(requests) % len(HOURS)])  # in the middle of a request
        requests.append(body)
        is_first = len(requests) == 1
        if not is_first:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                received.extend(span for scope in resource.scope_spans for span in scope.spans)
        self.send_response(503 if is_first else 200)
        if is_first:
            self.send_header("Retry-After", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

server = HTTPServer(("127.0.0.1", 0), Receiver)
threading.Thread(target=server.serve_forever, daemon=True).start()
before = time.time()
exporter = otp.OTLPExporter(f"http://127.0.0.1:{server.server_port}/v1/traces", protocol="http/protobuf", compression="none")
number = 0
with otp.stream(exporter) as stream:
    for hours in HOURS:
        for _ in range(2):
            with otp.record_function(f"outer-{number}"):
                set_ahead(3600 * hours)
                with otp.record_function(f"inner-{number}"):
                    pass
            number += 1
        assert stream.flush(60)
server.shutdown()
spans = {span.name: span for span in received}
assert len(received) == len(spans) == 2 * number, (len(received), number)
latest = int((before - 1) * 1e9)
for at in range(number):
    outer, inner = spans[f"outer-{at}"], spans[f"inner-{at}"]
    times = [latest, outer.start_time_unix_nano, inner.start_time_unix_nano, inner.end_time_unix_nano, outer.end_time_unix_nano]
    assert times == sorted(times), (at, times)
    latest = times[-1]
print(exporter.stats.accepted_spans, exporter.stats.failed_spans, exporter.stats.retries)
"""


@pytest.fixture
def settable(tmp_path):
    """The library that lets a program set its wall clock."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux's LD_PRELOAD")
    library = tmp_path / "wall_clock.so"
    source = HELPERS / "wall_clock.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True)
    return str(library)


def test_a_wall_clock_that_is_set(settable):
    """No span is out of order or lasts less than nothing, none is lost, and no flush or request ends early or hangs."""
    done = run(PROGRAM, is_new=True, LD_PRELOAD=settable)
    assert (done.returncode, done.stdout, done.stderr) == (0, "24 0 1\n", "")
