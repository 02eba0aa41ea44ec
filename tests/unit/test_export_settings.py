"""Keywords and standard variables, against OpenTelemetry's own exporters."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcPeer
from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpPeer
from opentelemetry.util.re import parse_env_headers

from otel_torchprof._export import variables
from otel_torchprof._export.settings import QueueSettings, Settings
from otel_torchprof.errors import forget_warnings

HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
PREFIX = "OTEL_EXPORTER_OTLP_"


@pytest.fixture(autouse=True)
def _warned_of_nothing():
    forget_warnings()


def otlp(**named):
    """Variables from their last words; ``traces_`` before one makes it that of traces."""
    return {PREFIX + name.upper(): value for name, value in named.items()}


GRPC_ENVIRONMENTS = [
    {},
    otlp(endpoint="http://collector:4317"),
    otlp(endpoint="https://collector:4317"),
    otlp(endpoint="collector:4317"),
    otlp(endpoint="collector:4317", insecure="true"),
    otlp(endpoint="collector:4317", insecure="TRUE"),
    otlp(endpoint="collector:4317", insecure="false"),
    otlp(endpoint="http://collector"),
    otlp(endpoint="http://collector:4317/ignored/path"),
    otlp(endpoint="dns:///collector:4317", insecure="true"),
    otlp(endpoint="unix:/run/collector.sock", insecure="true"),
    otlp(endpoint="[::1]:4317", insecure="true"),
    otlp(endpoint="http://general:1", traces_endpoint="http://traces:2"),
    otlp(endpoint="general:1", traces_endpoint="traces:2", insecure="false", traces_insecure="true"),
    otlp(endpoint="https://general:1", traces_insecure="true"),
    otlp(headers="Api-Key=abc,tenant=a%20b"),
    otlp(headers="general=1", traces_headers="traces=2"),
    otlp(headers=" spaced = value , , auth=Bearer abc=="),
    otlp(timeout="3"),
    otlp(timeout="3", traces_timeout="0.5"),
    otlp(compression="gzip"),
    otlp(compression="GZip"),
    otlp(traces_compression="gzip"),
]


@pytest.mark.parametrize("environ", GRPC_ENVIRONMENTS, ids=str)
def test_grpc_as_opentelemetry(monkeypatch, environ):
    """For gRPC the same variables mean what they mean to OpenTelemetry's own exporter."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    peer = GrpcPeer()
    ours = Settings.from_environment(environ)
    compression = {grpc.Compression.Gzip: "gzip", grpc.Compression.NoCompression: "none"}[peer._compression]
    theirs = (peer._endpoint, peer._insecure, dict(peer._headers), peer._timeout, compression)
    assert (ours.endpoint, ours.insecure, ours.headers, ours.timeout, ours.compression) == theirs
    peer.shutdown()


HTTP_ENVIRONMENTS = [
    {},
    otlp(endpoint="http://collector:4318"),
    otlp(endpoint="https://collector:4318/"),
    otlp(endpoint="https://collector/prefix"),
    otlp(traces_endpoint="http://collector:4318"),
    otlp(traces_endpoint="http://collector:4318/custom/"),
    otlp(endpoint="http://general:1", traces_endpoint="http://traces:2/v1/traces"),
    otlp(headers="Api-Key=abc,tenant=a%20b"),
    otlp(headers="general=1", traces_headers="traces=2"),
    otlp(timeout="3"),
    otlp(timeout="3", traces_timeout="0.5"),
    otlp(timeout="soon"),
    otlp(compression="gzip"),
    otlp(traces_compression="none", compression="gzip"),
]


@pytest.mark.parametrize("environ", HTTP_ENVIRONMENTS, ids=str)
def test_http_as_opentelemetry(monkeypatch, environ):
    """For HTTP the same variables mean what they mean to OpenTelemetry's own exporter."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    peer = HttpPeer()
    ours = Settings.from_environment({**environ, **HTTP})
    of_theirs = {n: v for n, v in peer._client._headers.items() if not n.lower().startswith(("content-", "user-agent"))}
    theirs = (peer._endpoint, of_theirs, peer._client._timeout, peer._compression.value)
    assert (ours.endpoint, ours.headers, ours.timeout, ours.compression) == theirs
    assert ours.insecure is ours.endpoint.startswith("http:")
    peer.shutdown()


@pytest.mark.parametrize("setting", ["certificate_file", "client_certificate_file", "client_key_file"])
@pytest.mark.parametrize("infix", ["", "TRACES_"])
def test_files(setting, infix, tmp_path):
    """Each file can be named for all signals, for traces, and by keyword, which counts first."""
    files = {name: str(tmp_path / name) for name in ("certificate", "client_certificate", "client_key", "other")}
    for path in files.values():
        (tmp_path / path).touch()
    name = setting.removesuffix("_file")
    environ = {f"{PREFIX}{infix}CLIENT_CERTIFICATE": files["client_certificate"]}
    environ[f"{PREFIX}{infix}{name.upper()}"] = files[name]
    assert getattr(Settings.from_environment(environ), setting) == files[name]
    assert getattr(Settings.from_environment(environ, **{setting: tmp_path / "other"}), setting) == files["other"]


def test_protocol():
    """The protocol is gRPC unless a variable, or before it a keyword, says HTTP; the default endpoint goes with it."""
    assert Settings.from_environment({}).protocol == "grpc"
    for environ in (HTTP, otlp(traces_protocol=" HTTP/protobuf ", protocol="grpc")):
        assert Settings.from_environment(environ).endpoint == "http://localhost:4318/v1/traces"
    assert Settings.from_environment(HTTP, protocol="grpc").endpoint == "localhost:4317"


@pytest.mark.parametrize(
    ("environ", "reported"),
    [
        (otlp(protocol="http/json"), "'http/json' is ignored: allowed are 'grpc' and 'http/protobuf'"),
        (otlp(endpoint="http://user:secret@host:port/?key=secret"), "'http://***@host:port/?***' is ignored"),
        (otlp(traces_endpoint="http://user:secret@[host"), "'http://***@[host' is ignored"),
        (otlp(endpoint="a host?key=secret"), "'a host?***' is ignored"),
        (otlp(timeout="-1"), "'-1' is ignored: allowed is a number of seconds above 0"),
        (otlp(timeout="nan"), "'nan' is ignored"),
        (otlp(compression="zip"), "'zip' is ignored: allowed are 'gzip' and 'none'"),
        (otlp(insecure="maybe", endpoint="host:1"), "'maybe' is ignored: allowed are true and false"),
        (otlp(headers="secret"), "item 1 is not name=value"),
        (otlp(headers='a=1,b="secret"'), "item 2 is not name=value"),
        (otlp(headers="key=sec%0Aret"), "the value of 'key' is not a str of printable ASCII"),
        (otlp(certificate="/nowhere/ca.pem"), "'/nowhere/ca.pem' is ignored: it must be a file that can be read"),
    ],
    ids=str,
)
def test_a_bad_variable(environ, reported, caplog):
    """It is warned of once, without what may be secret, and everything is as if it were not set."""
    settings = [Settings.from_environment(environ) for _ in range(3)]
    assert len(caplog.messages) == 1
    assert reported in caplog.text
    assert next(iter(environ)) in caplog.text
    assert "secret" not in caplog.text
    kept = {name: value for name, value in environ.items() if name.endswith("ENDPOINT") and len(environ) > 1}
    expected = Settings.from_environment(kept)
    if "a=1" in str(environ):
        assert settings[0].headers == {"a": "1"}
    else:
        assert settings[0] == expected


def test_a_key_without_certificate(tmp_path, caplog):
    """A client key in a variable without a certificate is warned of and ignored; as a keyword it is an error."""
    key = tmp_path / "key"
    key.touch()
    assert Settings.from_environment(otlp(client_key=str(key))).client_key_file is None
    assert "there is no client certificate to it" in caplog.text
    with pytest.raises(ValueError, match=r"client_key_file is .*, but there is no client_certificate_file"):
        Settings.from_environment({}, client_key_file=key)


@pytest.mark.parametrize(
    ("keywords", "reported"),
    [
        ({"protocol": "http"}, "protocol is 'http'; allowed are 'grpc' and 'http/protobuf'"),
        ({"endpoint": "http://user:secret@"}, "endpoint is 'http://***@'; allowed is http://host:port, "),
        ({"endpoint": "host name:1"}, "endpoint is 'host name:1'; allowed"),
        ({"endpoint": "host:1", "protocol": "http/protobuf"}, "endpoint is 'host:1'; allowed is a URL"),
        ({"timeout": 0}, "timeout is 0; allowed is a number of seconds above 0"),
        ({"timeout": "soon"}, "timeout is 'soon'; allowed"),
        ({"compression": "deflate"}, "compression is 'deflate'; allowed are 'gzip' and 'none'"),
        ({"compression": HttpCompression.Deflate}, "allowed are 'gzip' and 'none'"),
        ({"certificate_file": "/nowhere"}, "certificate_file is '/nowhere'; it must be a file that can be read"),
        ({"max_request_bytes": 0}, "max_request_bytes is 0; allowed is from 1 to"),
        ({"headers": "secret"}, "headers is not allowed: item 1 is not name=value"),
        ({"headers": {"key": "secret\n"}}, "the value of 'key' is not a str of printable ASCII"),
        ({"headers": {"key": b"secret"}}, "the value of 'key' is not a str"),
        ({"headers": {"no/name": "secret"}}, "item 1 is not name=value with an allowed name"),
        ({"headers": 5}, "headers must be a mapping, pairs of name and value, or a str"),
    ],
    ids=str,
)
def test_a_bad_keyword(keywords, reported):
    """It raises with its name, its value unless that may be secret, and what is allowed."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the texts are what is tested)
        Settings.from_environment({}, **keywords)
    assert reported in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("compression", "expected"),
    [
        ("gzip", "gzip"),
        ("none", "none"),
        (grpc.Compression.Gzip, "gzip"),
        (grpc.Compression.NoCompression, "none"),
        (HttpCompression.Gzip, "gzip"),
        (HttpCompression.NoCompression, "none"),
    ],
)
def test_compression_by_any_name(compression, expected):
    """The members of grpc's and of OpenTelemetry's enum are taken like the plain words."""
    assert Settings.from_environment({}, compression=compression).compression == expected


def test_compression_by_the_common_name():
    """The members of the enum that newer releases of OpenTelemetry have besides are taken too."""
    common = pytest.importorskip(
        "opentelemetry.exporter.otlp.common.http", reason="this OpenTelemetry has no such enum"
    )
    found = [
        Settings.from_environment({}, compression=getattr(common.Compression, name)).compression
        for name in ("GZIP", "NONE")
    ]
    assert found == ["gzip", "none"]


@pytest.mark.parametrize("headers", ["A=1,b=x%20y", {"A": "1", "b": "x y"}, [("A", "1"), ("b", "x y")]], ids=str)
def test_headers_by_keyword(headers):
    """A text, a mapping and pairs say the same; they are added to the variable's and win over them."""
    settings = Settings.from_environment(otlp(headers="b=variable,c=3"), headers=headers)
    assert settings.headers == {"a": "1", "b": "x y", "c": "3"}


@pytest.mark.parametrize(
    ("endpoint", "insecure", "expected"),
    [
        ("https://host:1", True, False),
        ("http://host:1", False, False),
        ("host:1", None, False),
        ("host:1", True, True),
        ("http://host:1", None, True),
    ],
)
def test_insecure_by_keyword(endpoint, insecure, expected):
    """False always gives TLS, True never takes it away from https://."""
    environ = otlp(insecure="false")
    assert Settings.from_environment(environ, endpoint=endpoint, insecure=insecure).insecure is expected


def test_credentials_in_a_grpc_endpoint():
    """User and password, which gRPC has no use for, do not become part of the host."""
    assert Settings.from_environment({}, endpoint="https://user:secret@host:1").endpoint == "host:1"
    assert Settings.from_environment({}, endpoint="user:secret@host:1").endpoint == "host:1"


def test_nothing_secret_is_shown():
    """Neither repr nor str has a header's value, a password or what stands in the query; text from outside is cleaned."""
    url = "https://user:password@host/v1/traces?token=query"
    settings = Settings.from_environment(HTTP, endpoint=url, headers={"authorization": "Bearer token-1", "x": "no"})
    displayed = f"{settings!r} {settings} {settings.displayed_endpoint}"
    assert "https://***@host/v1/traces?***" in displayed
    assert "authorization" in displayed
    assert not [secret for secret in ("password", "query", "token-1") if secret in displayed]
    assert settings.redacted("no: token-1 is not known") == "no: *** is not known"


ITEM = st.text(st.sampled_from('aB-_.%20=& ;",:/'), max_size=12)


@given(st.lists(ITEM, max_size=4).map(",".join))
def test_header_texts_as_opentelemetry(text):
    """Whatever the text, what we take of it is what OpenTelemetry's parser makes of it."""
    theirs = parse_env_headers(text, liberal=True)
    ours = Settings.from_environment({**otlp(headers=text), **HTTP}).headers
    assert ours.items() <= theirs.items()
    sendable = {
        name: value
        for name, value in theirs.items()
        if name and not set(name) & set(' ,:/=;"') and (name + value).isascii() and (name + value).isprintable()
    }
    assert ours == sendable


# ---- the queue's ----


def test_queue_settings_by_default():
    """OpenTelemetry's defaults, but for a queue that holds whole training steps."""
    expected = QueueSettings(
        schedule_delay_millis=5000,
        max_export_batch_size=512,
        max_queue_size=10_000_000,
        export_timeout_millis=30_000,
        max_queue_bytes=256 << 20,
    )
    assert QueueSettings.from_environment({}) == expected


@pytest.mark.parametrize(
    "setting", ["schedule_delay_millis", "max_export_batch_size", "max_queue_size", "export_timeout_millis"]
)
def test_queue_settings_from_variables(setting, caplog):
    """Each has its variable and, before it, its keyword; a bad value is warned of once and ignored."""
    (name,) = variables.VARIABLES[setting].variables
    assert name == f"OTEL_BSP_{setting.upper().removesuffix('_MILLIS')}"
    assert getattr(QueueSettings.from_environment({name: " 77 "}), setting) == 77
    assert getattr(QueueSettings.from_environment({name: "77"}, **{setting: 78}), setting) == 78
    for bad in ("0", "-1", "many", "1.5"):
        assert QueueSettings.from_environment({name: bad}) == QueueSettings()
        assert QueueSettings.from_environment({name: bad}) == QueueSettings()
        assert f"{name}={bad!r} is ignored: allowed is a whole number above 0" in caplog.messages
    assert len(caplog.messages) == 4


def test_the_bytes_of_a_queue_from_a_variable(caplog):
    """The memory of a queue has a variable of ours, in bytes or with a unit, and a keyword before it."""
    name = "OTEL_TORCHPROF_MAX_QUEUE_BYTES"
    assert QueueSettings.from_environment({name: "2m"}).max_queue_bytes == 2 << 20
    assert QueueSettings.from_environment({name: "2m"}, max_queue_bytes=5).max_queue_bytes == 5
    assert QueueSettings.from_environment({name: "2 MB"}) == QueueSettings()
    assert caplog.messages == [
        f"{name}='2 MB' is ignored: allowed is a whole number of bytes, or one with K, M or G, above 0"
    ]


@pytest.mark.parametrize(
    "name",
    ["schedule_delay_millis", "max_export_batch_size", "max_queue_size", "export_timeout_millis", "max_queue_bytes"],
)
@pytest.mark.parametrize("value", [0, -1, "x", None])
def test_bad_queue_settings(name, value):
    """The error names the setting, its value and what is allowed."""
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; allowed is a (whole )?number above 0"):
        QueueSettings(**{name: value})
