"""``otel-torchprof recover``: a trace, and what each thread was doing, from a box, whatever has become of its file."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading

import forked_programs
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from threaded import in_threads

import otel_torchprof as otp
from otel_torchprof._cli import main as cli
from otel_torchprof._cli.recover import redacted, text_of
from otel_torchprof._export import byte_stream
from otel_torchprof._files import rank_state
from otel_torchprof._files.box import BlackBox
from otel_torchprof._files.box_reading import read_box
from otel_torchprof._instrument import recovered as recovered_module
from otel_torchprof._native.blackbox import read_image, set_info
from otel_torchprof._native.recorder import CHUNK_BYTES
from otel_torchprof._process import threads
from otel_torchprof.parsers import BlackBoxOptions

LONG = 60
SECRETS = ("secret", "who.py", "elsewhere", "job 7", "actor", "thread of alice")
NO_BOX = "no image of a black box that this version can read"

PROGRAM = """
import sys, threading
import otel_torchprof as otp
from otel_torchprof._files.box import BlackBox
from otel_torchprof.parsers import black_box

def work(ready):
    with otp.record_function("in a thread"):
        ready.set()
        done.wait()

box = BlackBox(black_box(f"ops,1M,{sys.argv[1]}"), {"rank": 3})
box.start()
ready, done = threading.Event(), threading.Event()
thread = threading.Thread(target=work, args=(ready,))
thread.start()
ready.wait()
with otp.record_function("outer"), otp.record_function("inner"):
    with otp.record_function("ended"):
        pass
    print(box.path, flush=True)
    sys.stdin.readline()
done.set()
"""


@pytest.fixture
def box(tmp_path):
    """One that is open, with a label that has ended in one that has not, and another thread that does nothing any more."""
    made = BlackBox(BlackBoxOptions("ops", str(tmp_path / "boxes"), 1 << 20), {"rank": 3})
    made.start()
    in_threads(lambda: label("secret of a thread"))
    with otp.record_function("secret and open"):
        label("secret")
        yield made
    made.stop()


@pytest.fixture
def image(box):
    """Its bytes."""
    return box.path.read_bytes()


def label(name: str) -> None:
    with otp.record_function(name):
        pass


def recovered(path, *options: str) -> int:
    return cli.main(["recover", str(path), *options])


def spans_in(path) -> dict[str, dict[str, object]]:
    """The attributes of the spans of an OTLP file, by name."""
    request = ExportTraceServiceRequest.FromString(path.read_bytes())
    return {
        span.name: {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }


def test_the_box_of_a_process_that_lives(tmp_path, capsys):
    """It says what each thread is in, since when, and what ended last, and writes it beside the box, which stays the process's."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with forked_programs.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            path = process.stdout.readline().strip()
            assert recovered(path) == 0
            said = capsys.readouterr()
            process.communicate("\n", timeout=LONG)
        finally:
            process.kill()
    assert process.returncode == 0
    first, second, *threads = said.out.splitlines()
    assert first.startswith(f"rank 3, process {process.pid} of -c on {os.uname().nodename} was running at 20")
    assert second == "4 events of 2 threads"
    found = "\n".join(threads)
    assert f"thread main ({process.pid}): in inner for 0." in found
    assert "; the last to end was ended\n" in found
    assert " s  outer\n" in found
    assert ": in in a thread for " in found
    output = path.removesuffix(".otpbox") + ".otlp"
    assert said.err == f"otel-torchprof: wrote {output}\n"
    assert [name.name for name in tmp_path.iterdir()] == [os.path.basename(output)]  # noqa: PTH119 - a text


def test_what_was_open_is_unfinished(box, tmp_path):
    """Spans of what had not ended say so and end with the box's last event; the process is the resource."""
    assert recovered(box.path, "-o", str(tmp_path / "trace.otlp")) == 0
    spans = spans_in(tmp_path / "trace.otlp")
    assert {name for name, attributes in spans.items() if attributes.get("torch.unfinished")} >= {"secret and open"}
    assert "torch.unfinished" not in spans["secret"]
    request = ExportTraceServiceRequest.FromString((tmp_path / "trace.otlp").read_bytes())
    resource = {each.key: each.value for each in request.resource_spans[0].resource.attributes}
    assert resource["process.pid"].int_value == os.getpid()
    assert resource["torch.distributed.rank"].int_value == 3
    assert resource["service.name"].string_value != "unknown_service"


def test_ids_are_the_same_each_time(box, image, tmp_path):
    """A box that is read again is the same trace, so that a receiver that has a part of it has no span twice; another box is another."""
    (tmp_path / "box.otpbox").write_bytes(image)
    box.stop()
    other = BlackBox(BlackBoxOptions("ops", str(tmp_path / "boxes"), 1 << 20), {"rank": 3})
    other.start()
    label("of another box")
    (tmp_path / "other.otpbox").write_bytes(other.path.read_bytes())
    other.stop()
    for name in ("box", "other"):
        for at in (1, 2):
            cli.main(["recover", str(tmp_path / f"{name}.otpbox"), "-o", str(tmp_path / f"{name}{at}.otlp")])
    first, again = ((tmp_path / f"box{at}.otlp").read_bytes() for at in (1, 2))
    another, and_again = ((tmp_path / f"other{at}.otlp").read_bytes() for at in (1, 2))
    assert first == again
    assert another == and_again
    assert not ids_of(first) & ids_of(another)


def ids_of(otlp: bytes) -> set[bytes]:
    found = ExportTraceServiceRequest.FromString(otlp)
    spans = [span for resource in found.resource_spans for scope in resource.scope_spans for span in scope.spans]
    assert spans
    return {each for span in spans for each in (span.trace_id, span.span_id)}


@pytest.mark.parametrize("name", ["t.otlp", "t.otlp.gz", "t.jsonl", "t.json", "t.json.gz"])
def test_each_form(box, tmp_path, capsys, name):
    """Whatever it is written as, ``show`` reads all of it."""
    assert recovered(box.path, "-o", str(tmp_path / name)) == 0
    capsys.readouterr()
    assert cli.main(["show", str(tmp_path / name)]) == 0
    assert "secret of a thread" in capsys.readouterr().out


def test_none_writes_nothing(box, tmp_path, capsys):
    """With ``-o none`` it only says what the threads do."""
    before = set(tmp_path.rglob("*"))
    assert recovered(box.path, "-o", "none") == 0
    assert "in secret and open for" in capsys.readouterr().out
    assert set(tmp_path.rglob("*")) == before


def test_a_name_that_says_nothing(box, capsys):
    """It is refused before anything is read, with those that are allowed."""
    assert recovered(box.path, "-o", "t.txt") == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert "--output is 't.txt'; its name must end in .json, .json.gz, .otlp, .otlp.gz, .jsonl, .jsonl.gz" in found.err


@pytest.mark.parametrize("name", ["t.otlp", "t.jsonl", "t.json"])
def test_redacted(box, tmp_path, capsys, name):
    """No byte of trace or text has a label, or what process, host, run and threads are called; rank and times stay."""
    set_info({"rank": 3, "program": "who.py", "host": "elsewhere", "run_id": "job 7", "role": "actor"})
    in_threads(lambda: rename_and_label("thread of alice"))
    whole, partial = tmp_path / f"whole.{name}", tmp_path / name
    assert recovered(box.path, "-o", str(whole)) == 0
    said = capsys.readouterr().out
    assert all(secret in said for secret in ("secret", "who.py", "elsewhere"))
    assert b"thread of alice" in whole.read_bytes()
    assert recovered(box.path, "--redact", "-o", str(partial)) == 0
    said = capsys.readouterr().out
    assert "in (redacted) for" in said
    assert said.startswith(f"rank 3, process {os.getpid()} was running at ")
    for secret in SECRETS:
        assert secret not in said
        assert secret.encode() not in partial.read_bytes()


def rename_and_label(name: str) -> None:
    """In a thread that the system knows by that name."""
    from pathlib import Path

    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
    label("secret of the renamed")


def test_stacks_of_a_hang_are_shown(image, tmp_path, capsys):
    """Stacks that the hang watch wrote are printed, and left out by --redact."""
    contents = read_image(image)._replace(stacks='Thread 7 main\n  File "a.py", line 1 in load\n', hang_since_ns=10**18)
    text = text_of(contents)
    assert "Python's stacks, written because a thread has done nothing since " in text
    assert text.endswith('    Thread 7 main\n      File "a.py", line 1 in load\n')
    assert "a.py" not in text_of(redacted(contents))


def test_names_cannot_forge_the_text(box, capsys):
    """Control characters and line feeds of labels, programs and hosts are escapes."""
    set_info({"program": "a\nb\x1b[31m", "host": "c\rd"})
    with otp.record_function("x\nthread main (1): nothing open\x1b[2J"):
        assert recovered(box.path, "-o", "none") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("thread ")]) == 2
    assert r" of a\nb\x1b[31m on c\rd was running at " in lines[0]
    assert r"in x\nthread main (1): nothing open\x1b[2J for " in lines[2]


def test_half_of_it(image, tmp_path, capsys):
    """Of a file that is cut off what is whole is read, and what is not is said: exit status 1 where a part of a chunk is missing."""
    path = tmp_path / "half.otpbox"
    statuses = set()
    for size in (
        5000,
        *range(200, len(image), CHUNK_BYTES),
        len(image) - 100,
    ):  # chunks with their heads and little more
        path.write_bytes(image[:size])
        statuses.add(recovered(path))
        found = capsys.readouterr()
        assert "Traceback" not in found.err
        assert found.out or NO_BOX in found.err
    assert statuses == {0, 1}


def test_a_part_that_is_damaged_is_said(image, tmp_path, capsys):
    """It is counted with what it is of, the rest is written, and the exit status is 1; ``show`` and ``explain`` say it too."""
    path = tmp_path / "damaged.otpbox"
    damaged = bytearray(image)
    for chunk in range(
        2 * CHUNK_BYTES, len(image), CHUNK_BYTES
    ):  # each one's second record, behind its head and the first
        damaged[chunk + 176 : chunk + 224] = b"\xff" * 48
    path.write_bytes(damaged)
    assert recovered(path, "-o", str(tmp_path / "t.otlp")) == 1
    said = "chunks are damaged; what is whole in them was read"
    assert said in capsys.readouterr().err
    assert (tmp_path / "t.otlp").exists()
    assert cli.main(["show", str(path)]) == 1
    found = capsys.readouterr().err
    assert said in found
    assert f"{str(path)!r}: " in found


def random_bytes(image: bytes) -> bytes:
    return random.Random(1).randbytes(4096)


def random_after_the_magic(image: bytes) -> bytes:
    return image[:8] + random.Random(1).randbytes(len(image) - 8)


def of_another_version(image: bytes) -> bytes:
    return image[:8] + b"\xee" + image[9:]


@pytest.mark.parametrize(
    "damage", [lambda _: b"", random_bytes, random_after_the_magic, of_another_version], ids=["empty", "", "", ""]
)
def test_what_is_no_box(image, tmp_path, capsys, damage):
    """It is said in a line, with status 1, and nothing is written."""
    path = tmp_path / "no.otpbox"
    path.write_bytes(damage(image))
    assert recovered(path) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == f"otel-torchprof: cannot read {str(path)!r}: reading a black box: {NO_BOX}\n"
    assert list(tmp_path.glob("*.otlp")) == []


@pytest.mark.parametrize(
    ("name", "reason"), [(".", "it is a folder; name a file"), ("missing.otpbox", "No such file or directory")]
)
def test_what_cannot_be_read(tmp_path, capsys, name, reason):
    """A folder, and a file that there is not: the reason."""
    assert recovered(tmp_path / name) == 1
    assert capsys.readouterr().err == f"otel-torchprof: cannot read {str(tmp_path / name)!r}: {reason}\n"


def test_what_is_no_file_is_not_waited_for(tmp_path, monkeypatch, capsys):
    """Devices, folders, sockets and pipes that nobody writes to end each command at once, with what they are and what to do."""
    monkeypatch.setattr(byte_stream, "_PATIENCE", 0.01)
    pipe, listening = tmp_path / "rank_1", socket.socket(socket.AF_UNIX)
    os.mkfifo(pipe)
    with listening:
        listening.bind(str(tmp_path / "socket"))
        for path, kind in (
            (pipe, "pipe"),
            (tmp_path / "socket", "socket"),
            (tmp_path, "folder"),
            ("/dev/zero", "device"),
        ):
            assert recovered(path, "-o", "none") == 1
            assert f"cannot read {str(path)!r}: it is a {kind}; name a file" in capsys.readouterr().err
        for command in ("autopsy", "show", "explain", "send"):
            assert cli.main([command, str(pipe)]) == 1
            assert str(pipe) in capsys.readouterr().err
    assert cli.main(["send", "--recovered", str(pipe)]) == 1


def test_a_box_without_events(tmp_path, capsys):
    """It is said that there is nothing in it, and no file is written; ``show`` says it too."""
    made = BlackBox(BlackBoxOptions("steps", str(tmp_path / "boxes"), 1 << 20))
    made.start()
    try:
        assert recovered(made.path, "-o", str(tmp_path / "t.json")) == 0
        found = capsys.readouterr()
        assert "0 events of 0 threads" in found.out
        assert found.err == f"otel-torchprof: {str(made.path)!r} has no events: nothing was written\n"
        assert not (tmp_path / "t.json").exists()
        assert cli.main(["show", str(made.path)]) == 1
        assert capsys.readouterr().err == f"otel-torchprof: {str(made.path)!r} has no events\n"
    finally:
        made.stop()


def test_a_box_of_many_kinds_of_damage(image, tmp_path, capsys):
    """Whichever bytes of it are others, there is a result or an error, and never a traceback."""
    path = tmp_path / "damaged.otpbox"
    for seed in range(60):
        numbers, damaged = random.Random(seed), bytearray(image)
        for _ in range(numbers.choice((1, 20, 400))):
            at = numbers.randrange(8, len(image))
            damaged[at : at + 8] = numbers.choice((numbers.randbytes(8), bytes(8), b"\xff" * 8))
        path.write_bytes(damaged[: numbers.randrange(len(image)) if seed % 4 == 0 else None])
        assert recovered(path, "-o", str(tmp_path / numbers.choice(("t.otlp", "t.json")))) in {0, 1}
        assert "Traceback" not in capsys.readouterr().err


def test_explain_names_the_box(box, capsys):
    """Its messages name the box and not the trace that it has made of it, which is gone."""
    assert cli.main(["explain", str(box.path)]) == 1
    assert capsys.readouterr().err.startswith(f"otel-torchprof: {str(box.path)!r} has ")


def test_a_large_box_is_read_in_slices(tmp_path, monkeypatch):
    """However small the slices, the trace has the same spans and the text is the same; no slice has more events than fit."""
    made = BlackBox(BlackBoxOptions("ops", str(tmp_path / "boxes"), 4 << 20))
    made.start()
    try:
        with otp.record_function("around all"):
            for _ in range(10_000):
                label("one of many")
        contents, texts, spans = read_box(str(made.path)), [], []
        assert max(len(batch) for batch in contents.events(CHUNK_BYTES)) < 3_000
        for size in (1 << 30, CHUNK_BYTES):
            monkeypatch.setattr(rank_state, "SLICE_BYTES", size)
            monkeypatch.setattr(recovered_module, "SLICE_BYTES", size)
            texts.append(text_of(contents))
            found = [span for piece in recovered_module.recovered_spans(contents) for span in piece]
            spans.append(
                sorted((span.name, span.start_time, span.end_time) for span in found if span.name != "torch.part")
            )
    finally:
        made.stop()
    assert texts[0] == texts[1]
    assert spans[0] == spans[1]


def test_a_sparse_box_takes_no_memory(tmp_path, box):
    """The head of a box before 4 GiB of nothing is read in 400 MB of address space beside what the imports take."""
    sparse = tmp_path / "sparse.otpbox"
    sparse.write_bytes(box.path.read_bytes()[: 1 << 18])
    os.truncate(sparse, 4 << 30)
    program = """
import resource, sys
from otel_torchprof._cli import main, recover, show
import otel_torchprof._instrument.recovered
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20),) * 2)
sys.exit(main.main(["recover", "-o", "none", sys.argv[1]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(sparse)], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert "process" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def test_threads_of_this_package_are_not_listed(tmp_path):
    """What the garbage collector or a trial of the library recorded on a thread of this package's is no thread of the program."""
    made = BlackBox(BlackBoxOptions("ops", str(tmp_path / "boxes"), 1 << 20))
    made.start()
    try:
        for made_by, name in ((threads, "ours"), (threading, "theirs")):
            thread = made_by.Thread(target=label, args=(name,))
            thread.start()
            thread.join()
        found = read_box(str(made.path))
        moments = rank_state.last_moments(found)[0]
    finally:
        made.stop()
    assert [moment.last_ended for moment in moments] == ["theirs"]
    ours = f'Thread 7 otel-torchprof\n  File "/usr/lib/python3.11/threading.py", line 1 in run\n  File "{threads.__file__}", line 2 in run_ours\n'
    text = text_of(found._replace(stacks=f'{ours}Thread 8 main\n  File "a.py", line 1 in load\n', hang_since_ns=10**18))
    assert "in run_ours" not in text
    assert "line 1 in load" in text
