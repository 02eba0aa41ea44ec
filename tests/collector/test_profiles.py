"""OTLP profiles pass a real Collector behind its feature gate: what comes out has every sample that went in."""

from __future__ import annotations

import subprocess

import pytest
import urllib3
from collectors import OTELCOL
from fault_server import LONG, HttpReceiver, free_port
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import ExportProfilesServiceResponse
from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData
from profile_messages import profiles, samples

import otel_torchprof as otp

CONFIGURATION = """
receivers: {{otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{port}"}}}}}}}}
exporters: {{otlp_http: {{endpoint: "http://127.0.0.1:{store}", compression: none}}}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines: {{profiles: {{receivers: [otlp], exporters: [otlp_http]}}}}
"""


@pytest.fixture
def through_collector(tmp_path):
    """Returns what a Collector sends on for a request."""
    binary = OTELCOL.find()
    if binary is None:
        pytest.skip(OTELCOL.missing)
    with HttpReceiver() as store:
        port = free_port()
        (tmp_path / "c.yaml").write_text(CONFIGURATION.format(port=port, store=store.port))
        command = [binary, "--config", str(tmp_path / "c.yaml"), "--feature-gates=service.profilesSupport"]
        with (tmp_path / "output").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:

            def send(body):
                retries = urllib3.Retry(total=None, connect=200, backoff_factor=0.1, backoff_max=1)
                url = f"http://127.0.0.1:{port}/v1development/profiles"
                headers = {"Content-Type": "application/x-protobuf"}
                answer = urllib3.request("POST", url, body=body, headers=headers, retries=retries, timeout=LONG)
                assert answer.status == 200
                assert not ExportProfilesServiceResponse.FromString(answer.data).partial_success.rejected_profiles
                store.wait_for(1)
                return ProfilesData.FromString(store.arrived[0].body)

            try:
                yield send
            finally:
                process.terminate()


def test_profiles_pass(through_collector, tmp_path):
    """Values, stacks, attributes, links, times and the resource are the same behind the Collector."""
    with otp.profile(operators=False, with_stack=True, profile_memory=False) as prof:
        for _ in range(3):
            with otp.record_function("outer"), otp.record_function("inner"):
                pass
            prof.step()
    prof.export_as(tmp_path / "p.otlp-profiles")
    body = (tmp_path / "p.otlp-profiles").read_bytes()
    sent, received = ProfilesData.FromString(body), through_collector(body)
    assert samples(received) == samples(sent)
    assert received.resource_profiles[0].resource == sent.resource_profiles[0].resource
    assert received.dictionary.link_table == sent.dictionary.link_table
    for kind, profile in profiles(sent).items():
        of_received = profiles(received)[kind]
        assert (of_received.time_unix_nano, of_received.duration_nano) == (
            profile.time_unix_nano,
            profile.duration_nano,
        )
        assert [each.link_index for each in of_received.samples] == [each.link_index for each in profile.samples]
