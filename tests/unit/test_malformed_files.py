"""``show`` and ``send`` trust no file: what can be read is shown and sent, and the rest is an error with file and place."""

from __future__ import annotations

import gzip
import json
import os
import random
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import forked_programs
import pytest
from fault_server import HttpReceiver, free_port, status
from hypothesis import given
from hypothesis import strategies as st
from malformed_files import check, malformed, messages
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from otel_torchprof._cli import main as cli
from otel_torchprof._cli.show import read
from otel_torchprof._export.otlp_wire import parts
from otel_torchprof.errors import printable

ROOT = Path(__file__).resolve().parents[2]
CLI = (sys.executable, "-m", "otel_torchprof")
GOOD = {"ph": "X", "name": "good", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
IDS = {"traceId": "1" * 32, "spanId": "2" * 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all examples."""
    return tmp_path_factory.mktemp("malformed")


@given(st.integers(0, 1 << 40))
def test_whatever_the_file(folder, seed):
    """Any fault in any form: an error that names file and place, printable output, and what precedes the fault is counted and sent."""
    check(folder / "input", malformed(seed))


def events(*changed) -> bytes:
    """A Chrome trace with a good event before and after those that differ from it."""
    return json.dumps({"traceEvents": [GOOD, *({**GOOD, "name": "bad", **each} for each in changed), GOOD]}).encode()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ts": "soon"}, "ts is 'soon', expected a number up to 2305843009213693, event 2, at byte 85"),
        ({"ts": float("nan")}, "ts is nan, expected a number"),
        ({"ts": 1e300}, "ts is 1E+300, expected a number up to 2305843009213693"),
        ({"dur": 10**400}, "dur is of type int, expected a number"),
        ({"dur": float("inf")}, "dur is inf, expected a number"),
        ({"dur": []}, "dur is of type list"),
        ({"name": {"a": 1}}, "name is of type dict, expected a text"),
        ({"args": [1]}, "args is of type list, expected an object"),
        ({"args": {"span_id": "xyz"}}, "span_id is 'xyz', expected 16 hexadecimal digits"),
        ({"args": {"span_id": "-1"}}, "span_id is '-1'"),
        ({"args": {"span_id": "f" * 17}}, "span_id is 'fffffffffffffffff'"),
        ({"args": {"span_id": "1", "parent_id": []}}, None),
        ({"args": {"span_id": "1", "parent_id": [1]}}, "parent_id is of type list"),
        ({"args": {"span_id": "1", "attributes": "x"}}, "attributes is 'x', expected an object"),
        (
            {"args": {"span_id": "1", "attributes": {"torch.step.number": None}}},
            "torch.step.number is of type NoneType",
        ),
        (
            {"args": {"span_id": "1", "attributes": {"torch.aggregated.count": -5}}},
            "torch.aggregated.count is of type int, expected a",
        ),
        (
            {"args": {"span_id": "1", "attributes": {"torch.collapsed.duration": "nan"}}},
            "torch.collapsed.duration is 'nan'",
        ),
        ({"args": {"span_id": "1", "trace_id": {}}}, None),
        ({"pid": {}, "tid": [[]]}, None),
        ({"cat": ["x"]}, None),
        ({"dur": -5}, None),
    ],
)
def test_values_that_are_none(tmp_path, capsys, changed, said):
    """An event that cannot be counted is named with its place and its value, and those before and after it are counted; exit 1."""
    (tmp_path / "t").write_bytes(events(changed))
    assert cli.main(["show", str(tmp_path / "t")]) == (said is not None)
    found = capsys.readouterr()
    (row,) = [line.split() for line in found.out.splitlines() if line.strip().startswith("good")]
    assert row[-1] == "2"
    if said is None:
        assert found.err == ""
        assert " bad " in found.out
    else:
        assert f"'{tmp_path}/t': not counted: 1; the first: {said}" in found.err


FAULTS = {
    "cut in an event": (events()[:100], "the file is cut off"),
    "no comma": (b'{"traceEvents": [' + json.dumps(GOOD).encode() + b" x]}", "event is no object, event 2"),
    "a digit too many": (b'[{"ph": "X", "name": "good", "ts": 1' + b"0" * 5000 + b"}, " + json.dumps(GOOD).encode() + b"]", "event 1"),
    "deep": (b"[" + json.dumps(GOOD).encode() + b"," + b"[" * 100_000 + b"]" * 100_000 + b"]", "event is no object, event 2"),
    "large": (b"[" + json.dumps(GOOD).encode() + b',"' + b"x" * (2 << 20) + b'"]', "a value of more than 1,048,576 bytes, event 2"),
    "binary": (json.dumps(GOOD).encode().join((b"[", b"\xff\xfe\x00")), "found '\\udcff\\udcfe\\x00'"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_documents_that_are_none(tmp_path, capsys, name):
    """What precedes the fault in the JSON itself is shown, and the error names the byte; exit 1."""
    content, said = FAULTS[name]
    (tmp_path / "t").write_bytes(content)
    assert cli.main(["show", str(tmp_path / "t")]) == 1
    found = capsys.readouterr()
    assert " good " in found.out
    assert f"'{tmp_path}/t': " in found.err
    assert "at byte " in found.err
    assert said in found.err


def test_what_is_no_fault(tmp_path, capsys):
    """Bytes that are no UTF-8, large metadata before the events and empty lines are read."""
    content = b'{"meta": "' + b"x\\\\" * 900_000 + b'", "more": [[1, {"a": "]"}], -1.5e3, null], "traceEvents": [\r\n'
    (tmp_path / "t").write_bytes(content + json.dumps(GOOD).encode().replace(b"good", b"caf\xe9") + b"]}")
    assert cli.main(["show", str(tmp_path / "t")]) == 0
    assert "caf\\udce9" in capsys.readouterr().out
    line = {"resourceSpans": [{"scopeSpans": [{"spans": [{**IDS, "name": "ours"}]}]}]}
    (tmp_path / "t").write_bytes(b"\n" + json.dumps(line).encode() + b"\n\r\n  \n")
    assert cli.main(["show", str(tmp_path / "t")]) == 0
    assert " ours " in capsys.readouterr().out


def test_gzip_with_something_else_behind_it(tmp_path, capsys):
    """Garbage after a member, and a member that is cut off where a message ends, are errors; zeros are padding."""
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{**IDS, "name": "good"}]}]}]}).encode() + b"\n"
    member = gzip.compress(line)
    for content, said in (
        (member + b"garbage", f"at byte {len(line)} after decompression: expected gzip"),
        (member + member[:-8], f"at byte {2 * len(line)} after decompression: the file is cut off"),
        (member + b"\0" * 100_000 + member, ""),
    ):
        (tmp_path / "t.gz").write_bytes(content)
        for command in (["show"], ["send", "--endpoint", f"http://127.0.0.1:{free_port()}", "--timeout", "0.01"]):
            if command[0] == "send" and not said:
                continue
            assert cli.main([*command, str(tmp_path / "t.gz")]) == bool(said)
            found = capsys.readouterr()
            assert said in found.err or command[0] == "send"
            assert " good " in found.out or command[0] == "send"


def test_what_is_no_file(tmp_path, capsys):
    """Folders, files that are not there, endless devices and names with a zero byte are errors that say what to do."""
    for path, said in (
        (str(tmp_path), "Is a directory; give the name of a file in it"),
        (str(tmp_path / "none"), "No such file or directory; check the name"),
        (f"{sys.executable}/x", "Not a directory; a part of the path is a file"),
        ("a\0b", "embedded null byte"),
        ("/dev/zero", "at byte 0: expected the size of a message, found 0"),
        ("/dev/null", "at byte 0: the file is empty"),
    ):
        for command in (["show"], ["send", "--endpoint", "http://127.0.0.1:9"]):
            assert cli.main([*command, path]) == 1
            found = capsys.readouterr().err
            assert repr(path) in found
            assert said in found


def test_a_pipe(tmp_path, capsys):
    """A FIFO is read as a file is."""
    os.mkfifo(tmp_path / "fifo")
    writer = threading.Thread(target=(tmp_path / "fifo").write_bytes, args=(events(),))
    writer.start()
    assert cli.main(["show", str(tmp_path / "fifo")]) == 0
    writer.join()
    assert " good " in capsys.readouterr().out


def test_a_file_that_cannot_be_read(tmp_path):
    """The system's refusal, at the begin or in the middle, is an error with the path."""
    found = forked_programs.run((*CLI, "show", "/proc/self/mem"), cwd=ROOT)
    assert found.returncode == 1
    assert (
        found.stderr
        == "otel-torchprof: cannot read '/proc/self/mem': Input/output error; copy it elsewhere and try again\n"
    )


# ---- the terminal ----

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\x7f\r\n\ud800"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202egnp\\u2066\\x7f\\r\\n\\ud800"


def assert_printable(*texts: str) -> None:
    for text in texts:
        assert [char for char in text if not char.isprintable() and char != "\n"] == []


def test_escapes_of_a_terminal(tmp_path, capsys):
    """Control characters in names, files' names, arguments and errors are printed as visible escapes."""
    assert printable(ESCAPE) == SHOWN
    path = tmp_path / f"a {ESCAPE.encode('utf-8', 'surrogatepass').decode('utf-8', 'surrogateescape')}"
    path.write_bytes(events({"name": ESCAPE}, {"ts": ESCAPE}, {"name": f"ProfilerStep#{ESCAPE}"}))
    for words in ((), ("--steps",)):
        assert cli.main(["show", *words, str(path)]) == 1
        found = capsys.readouterr()
        assert_printable(found.out, found.err)
        assert bool(words) or "\\x1b]0;owned\\x07" in found.out
    with pytest.raises(SystemExit) as caught:
        cli.main(["show", "--sort", ESCAPE, f"--x{ESCAPE}", "file"])
    assert caught.value.code == 2
    with pytest.raises(SystemExit):
        cli.main(["convert", "file", ESCAPE, "-o", "out"])
    assert_printable(capsys.readouterr().err)


def test_a_command_that_can_be_pasted(tmp_path, capsys, caplog):
    """The command that goes on quotes the files for a shell, and what a receiver says moves no cursor."""
    line = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{**IDS, "name": "a"}]}]}]}).encode() + b"\n"
    names = ("it's; rm -rf $HOME `x`", "\x1b[31m\nx", "plain")
    paths = [str(tmp_path / name) for name in names]
    for path in paths:
        Path(path).write_bytes(line)
    with HttpReceiver(turns=[status(503, {"Retry-After": "3600"}, body=ESCAPE.encode("utf-8", "replace"))]) as receiver:
        assert cli.main(["send", "--endpoint", receiver.url, "--protocol", "http/protobuf", *paths]) == 1
    said = capsys.readouterr().err
    assert_printable(said, caplog.text)
    command = said.partition("continue with: ")[2].partition("\n")[0]
    displayed = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True).stdout
    assert displayed.decode().split("\0")[:-1] == ["otel-torchprof", "send", "--from", "0", *paths]
    assert shlex.quote(paths[0]) in command


def test_names_in_the_table_of_a_run(tmp_path):
    """The table that ``run`` prints, and the name of the script, are printable; ``table()`` itself stays as torch's."""
    script = tmp_path / "a\x1b[31m.py"
    script.write_text(
        "import otel_torchprof as otp\n"
        "with otp.profile(operators=False) as prof:\n    with otp.record_function('\\x1b[2Jb'): pass\n"
        "assert '\\x1b[2Jb' in prof.key_averages().table()\n"
    )
    done = forked_programs.run((*CLI, "run", "--table", "-o", str(tmp_path / "\x1bt.json"), str(script)), cwd=ROOT)
    assert done.returncode == 0
    assert "\\x1b[2Jb" in done.stderr
    assert "\\x1bt.json" in done.stderr
    assert_printable(done.stdout, done.stderr)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_of_any_encoding(tmp_path, encoding):
    """What the terminal's encoding does not have is printed as escapes."""
    (tmp_path / "t").write_bytes(events({"name": "caf\u00e9 \U0001f600"}))
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        (*CLI, "show", str(tmp_path / "t")), capture_output=True, cwd=ROOT, env=environment, check=True
    )
    assert "caf\u00e9".encode(encoding, "backslashreplace") in done.stdout


def test_output_that_cannot_be_written(tmp_path):
    """A full disk is an error; a reader that has seen enough, and a closed stdout, are none that is worth a message."""
    (tmp_path / "t").write_bytes(events())
    for where, code, said in (
        (">/dev/full", 1, "cannot write the result: No space left on device"),
        (">&-", 0, ""),
        ("2>&- >/dev/full", 1, ""),
    ):
        command = f"{shlex.join(CLI)} show {tmp_path}/t {where}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
        assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (code, True, False)
    command = f"set -o pipefail; {shlex.join(CLI)} show {tmp_path}/t | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr == ""


# ---- large messages and lines ----


@given(st.integers(0, 1 << 30), st.integers(40, 900))
def test_parts_of_a_message(seed, most):
    """Taken apart, a message has the same spans in order, with their resource and scope; each part is small, or one span."""
    message = messages(random.Random(seed))[0]
    found = list(parts(message, most))
    whole = ExportTraceServiceRequest.FromString(message)
    spans = []
    for body, count in found:
        request = ExportTraceServiceRequest.FromString(body)
        (resource_spans,) = request.resource_spans
        (scope_spans,) = resource_spans.scope_spans
        assert resource_spans.resource == whole.resource_spans[0].resource
        assert resource_spans.schema_url == "u"
        assert scope_spans.scope.name == "s"
        assert len(scope_spans.spans) == count
        assert count == 1 or len(body) <= most + most // 4 + 100
        spans += scope_spans.spans
    assert spans == list(whole.resource_spans[0].scope_spans[0].spans)


def test_a_large_line_is_taken_apart(tmp_path):
    """A line of JSON above a megabyte goes in several requests, each with what is written behind its spans; one that stops goes on before it."""
    spans = [{**IDS, "spanId": f"{n:016x}", "name": f"span {n} \u00e9" + "x" * 1000} for n in range(1, 3000)]
    line = {
        "resourceSpans": [{"scopeSpans": [{"spans": spans, "scope": {"name": "s"}}], "schemaUrl": "u", "resource": {}}]
        * 2,
        "x": [1],
    }
    (tmp_path / "t.jsonl").write_text(json.dumps(line, ensure_ascii=False) + "\n")
    sums, problems = read(str(tmp_path / "t.jsonl"))
    assert (len(sums), problems) == (2 * len(spans), [])
    with HttpReceiver() as receiver:
        assert (
            cli.main(["send", "--endpoint", receiver.url, "--protocol", "http/protobuf", str(tmp_path / "t.jsonl")])
            == 0
        )
    assert receiver.names == [span["name"] for span in spans] * 2
    for arrived in receiver.arrived:
        for each in ExportTraceServiceRequest.FromString(arrived.body).resource_spans:
            assert (each.schema_url, each.scope_spans[0].scope.name) == ("u", "s")


def test_what_follows_a_line_that_is_none(tmp_path, capsys):
    """The error for a line that cannot be sent says how to send what follows it."""
    lines = [json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{**IDS, "name": name}]}]}]}) for name in "ab"]
    (tmp_path / "t.jsonl").write_text(f"{lines[0]}\n{'[' * 5000}\n{lines[1]}\n")
    with HttpReceiver() as receiver:
        words = ["send", "--endpoint", receiver.url, "--protocol", "http/protobuf", str(tmp_path / "t.jsonl")]
        assert cli.main(words) == 1
        said = capsys.readouterr().err
        assert f"at byte {len(lines[0]) + 1}: expected" in said
        offset = said.partition("--from ")[2].split()[0]
        assert cli.main([words[0], "--from", offset, *words[1:]]) == 0
        assert receiver.names == ["a", "b"]
        assert cli.main([words[0], "--from", "999999", *words[1:]]) == 1
    assert "--from is 999999, and the file has" in capsys.readouterr().err


def test_numbers_of_an_input_are_the_same_again():
    """An input follows from its number alone."""
    assert [malformed(seed) for seed in range(50)] == [malformed(seed) for seed in range(50)]
    assert len({malformed(seed).content for seed in range(50)}) > 40
