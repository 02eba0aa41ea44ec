"""What each standard variable for traces does to torch's spans; see ``test_standard_variables``."""

from __future__ import annotations

import pytest
from configured_programs import STEPS
from fault_server import LONG, SILENCE, silence
from given_variables import (
    GRPC,
    HTTP,
    OTLP,
    PROTOCOLS,
    SPANS,
    Given,
    Kept,
    before_the_end_of,
    profile,
    proves,
    sent,
    spans_in,
    steps,
)

import otel_torchprof as otp


def of_traces(suffix: str) -> tuple[str, str]:
    return f"{OTLP}TRACES_{suffix}", f"{OTLP}{suffix}"


@proves("OTEL_TRACES_EXPORTER")
def exporters(name: str, given: Given) -> None:
    assert given.programs["none"]["recording"] == "on"
    assert "torch.step" in {span for arrived in given.programs["spans"] for span in arrived.names}
    given.set(**{name: "otlp,chrome,otlp_proto_http,otlp", "OTEL_TORCHPROF_CHROME_TRACE": "/dev/null"})
    given.set(**{f"{OTLP}ENDPOINT": given.receiver(HTTP).url})
    given.instrument()
    assert list(otp.TorchInstrumentor().health.exporters) == [
        "0 OTLPExporter",
        "1 ChromeTraceExporter",
        "2 OTLPExporter",
    ]


@proves("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG")
def share_of_steps(name: str, given: Given) -> None:
    arrived = [span for each in given.programs["spans"] for span in each.names]
    assert arrived.count("torch.step") == STEPS // 2
    for sampler, share, expected in (
        ("always_off", "1", 0),
        ("traceidratio", "0.5", STEPS // 2),
        ("always_on", "0", STEPS),
    ):
        given.set(OTEL_TRACES_SAMPLER=sampler, OTEL_TRACES_SAMPLER_ARG=share)
        exporter = Kept()
        provider = given.instrument(exporter)
        steps()
        provider.force_flush()
        otp.TorchInstrumentor().uninstrument()
        assert exporter.names.count("torch.step") == expected, sampler
        assert len(profile().spans()) == SPANS


@proves("OTEL_PYTHON_ID_GENERATOR")
def ids(name: str, given: Given) -> None:
    found = [span for each in given.programs["spans"] for span in spans_in(each.body)]
    assert {int.from_bytes(span.trace_id, "big") >> 64 for span in found} <= set(range(1, 3 * STEPS))


@proves(*of_traces("PROTOCOL"))
def protocol_of_traces(name: str, given: Given) -> None:
    for protocol, other in (PROTOCOLS, PROTOCOLS[::-1]):
        receiver = given.receiver(protocol)
        given.before_the_general(name, protocol, other)
        given.set(**{f"{OTLP}TRACES_ENDPOINT": receiver.url})
        assert profile().export(given.exporter()) == SPANS
        assert len(receiver.names) == SPANS


@proves(*of_traces("ENDPOINT"))
def endpoint_of_traces(name: str, given: Given) -> None:
    for protocol in PROTOCOLS:
        receiver = given.receiver(protocol)
        general = name == f"{OTLP}ENDPOINT"
        url = receiver.url.removesuffix("/v1/traces") if general else receiver.url.replace("v1/traces", "mine")
        given.before_the_general(name, url, "http://nowhere.invalid")
        assert profile().export(given.exporter(protocol=protocol)) == SPANS
        path = "/v1/traces" if general else "/mine"
        assert [arrived.path for arrived in receiver.arrived] == ["" if protocol == GRPC else path]


@proves(*of_traces("INSECURE"))
def insecure_of_traces(name: str, given: Given) -> None:
    receiver = given.receiver(GRPC)
    given.before_the_general(name, "true", "false")
    assert profile().export(given.exporter(endpoint=f"localhost:{receiver.port}")) == SPANS


@proves(*of_traces("HEADERS"))
def headers_of_traces(name: str, given: Given) -> None:
    for protocol in PROTOCOLS:
        receiver = given.receiver(protocol)
        given.before_the_general(name, "tenant=a%20b", "tenant=other")
        profile().export(given.exporter(endpoint=receiver.url, protocol=protocol))
        assert [arrived.headers["tenant"] for arrived in receiver.arrived] == ["a b"]


@proves(*of_traces("TIMEOUT"))
def timeout_of_traces(name: str, given: Given) -> None:
    for protocol, turn in zip(PROTOCOLS, (SILENCE, silence), strict=True):
        receiver = given.receiver(protocol, turns=[turn])
        given.before_the_general(name, "0.05", LONG)
        with before_the_end_of(receiver), pytest.raises(otp.ExportError):
            profile().export(given.exporter(endpoint=receiver.url, protocol=protocol))


@proves(*of_traces("COMPRESSION"))
def compression_of_traces(name: str, given: Given) -> None:
    given.before_the_general(name, "gzip", "none")
    receiver = given.receiver(HTTP)
    profile().export(given.exporter(endpoint=receiver.url, protocol=HTTP))
    assert [arrived.headers["content-encoding"] for arrived in receiver.arrived] == ["gzip"]


@proves(*of_traces("CERTIFICATE"))
def trusted_by_traces(name: str, given: Given) -> None:
    for protocol in PROTOCOLS:
        receiver = given.receiver(protocol, tls=given.tls)
        given.before_the_general(name, given.tls.path("ca.pem"), given.tls.path("stranger.pem"))
        assert profile().export(given.exporter(endpoint=receiver.url, protocol=protocol)) == SPANS


@proves(*of_traces("CLIENT_KEY"), *of_traces("CLIENT_CERTIFICATE"))
def client_of_traces(name: str, given: Given) -> None:
    signal = "TRACES_" if "TRACES_" in name else ""
    for protocol in PROTOCOLS:
        receiver = given.receiver(protocol, tls=given.tls, client_certificates=True)
        given.set(**{f"{OTLP}CERTIFICATE": given.tls.path("ca.pem")})
        for what, file in (("CLIENT_KEY", "client.key"), ("CLIENT_CERTIFICATE", "client.pem")):
            given.before_the_general(f"{OTLP}{signal}{what}", given.tls.path(file), given.tls.path("ca.pem"))
        assert profile().export(given.exporter(endpoint=receiver.url, protocol=protocol)) == SPANS
        with given.monkeypatch.context() as changed:
            changed.delenv(f"{OTLP}{signal}CLIENT_CERTIFICATE")
            changed.delenv(f"{OTLP}CLIENT_CERTIFICATE", raising=False)
            with pytest.raises(otp.ExportError):
                profile().export(given.exporter(endpoint=receiver.url, protocol=protocol, timeout=0.2))


@proves("OTEL_BSP_SCHEDULE_DELAY")
def delay(name: str, given: Given) -> None:
    given.set(**{name: "1"})
    exporter = Kept()
    given.instrument(exporter)
    steps()
    assert exporter.came.wait(LONG)


@proves("OTEL_BSP_MAX_QUEUE_SIZE")
def queue(name: str, given: Given) -> None:
    given.set(**{name: "2"})
    exporter = Kept()
    exporter.may_go_on.clear()
    provider = given.instrument(exporter)
    for _ in range(4):
        steps(2)
        otp.TorchInstrumentor()._processor.key_averages()  # takes what there is; nothing leaves the queue
    exporter.may_go_on.set()
    provider.force_flush()
    (stats,) = otp.TorchInstrumentor().health.exporters.values()
    assert stats.dropped_spans > 0


@proves("OTEL_BSP_MAX_EXPORT_BATCH_SIZE")
def batches(name: str, given: Given) -> None:
    given.set(**{name: "2"})
    exporter = Kept()
    provider = given.instrument(exporter)
    steps()
    provider.force_flush()
    assert max(len(batch) for batch in exporter.batches) == 2
    assert exporter.names.count("torch.step") == STEPS


@proves("OTEL_BSP_EXPORT_TIMEOUT")
def time_of_a_batch(name: str, given: Given) -> None:
    given.set(**{name: "50"})
    receiver = given.receiver(HTTP, turns=[silence])
    exporter = given.exporter(endpoint=receiver.url, protocol=HTTP, timeout=LONG)
    provider = given.instrument(exporter)
    steps()
    assert provider.force_flush(int(LONG * 500))
    assert exporter.stats.retries > 0  # the silence was not waited out


@proves("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT")
def attributes(name: str, given: Given) -> None:
    prof = profile()  # one for both: some attributes are read once a second
    before = sent(given, prof)
    given.set(OTEL_ATTRIBUTE_COUNT_LIMIT="0")
    given.set(**{name: "1"})
    after = sent(given, prof)
    assert [len(span.attributes) for span in after] == [min(len(span.attributes), 1) for span in before]
    assert any(span.dropped_attributes_count for span in after)
    assert [s.dropped_attributes_count + len(s.attributes) for s in after] == [len(s.attributes) for s in before]


@proves("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT")
def texts(name: str, given: Given) -> None:
    given.set(OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT="5")
    given.set(**{name: "3"})
    found = [item.value.string_value for span in sent(given, profile()) for item in span.attributes]
    assert max(map(len, found)) == 3


@proves("OTEL_SPAN_LINK_COUNT_LIMIT")
def links(name: str, given: Given) -> None:
    given.set(**{name: "0"})
    found = sent(given, profile(2))
    assert {len(span.links) for span in found} == {0}
    assert sum(span.dropped_links_count for span in found) == 1


@proves("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT")
def nothing_that_they_could_limit(name: str, given: Given) -> None:
    for value in ("128", "0"):
        given.set(**{name: value})
        found = sent(given, profile(2))
        assert sum(len(span.links) for span in found) == 1
        assert not any(link.attributes for span in found for link in span.links)
        assert not any(len(span.events) + span.dropped_events_count for span in found)
