"""``otel-torchprof run --blackbox``: a script that dies leaves its black box beside its outputs, one that ends leaves nothing."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import forked_programs
import pytest

from otel_torchprof._cli import main as cli
from otel_torchprof._cli.run import _words_of, box_name, options_of
from otel_torchprof._cli.watcher import ended_by_sigterm
from otel_torchprof._files.box_reading import read_box
from otel_torchprof.parsers import BlackBoxOptions

if TYPE_CHECKING:
    from otel_torchprof._native.blackbox import Contents

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60
"""After which a program hangs."""
KERNEL = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
DIED = "otel-torchprof: the program died without ending its recording; what it did last "

DEATHS = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGSEGV": ("ctypes.string_at(0)", -signal.SIGSEGV),
    "abort": ("os.abort()", -signal.SIGABRT),
    "_exit": ("os.chdir('/'); os._exit(7)", 7),
}
ENDS = {
    "falls off the end": "",
    "an exception": "raise LookupError('of the script')",
    "sys.exit(3)": "sys.exit(3)",
    "an interrupt": "raise KeyboardInterrupt",
    "a thread that works on": "threading.Thread(target=lambda: threading.main_thread().join()).start()",
}
SCRIPT = """
import ctypes, os, resource, signal, sys, threading
import otel_torchprof as otp

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with otp.record_function("outer"):
    with otp.record_function("first"):
        pass
    with otp.record_function("second"):
        {statement}
"""
KILL = DEATHS["SIGKILL"][0]


def started(folder: Path, statement: str, *words: str, **settings) -> subprocess.Popen[str]:
    """The command in a folder, whose ``train.py`` executes the statement inside of two labels; forked, or of a new interpreter."""
    script = settings.pop("script", folder / "train.py")
    script.write_text(SCRIPT.format(statement=statement or "pass"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings.pop("environment", {})}
    start = settings.pop("start", ("-m", "otel_torchprof"))
    popen = subprocess.Popen if settings.pop("is_new", False) else forked_programs.Popen
    return popen(
        [sys.executable, *start, "run", *words, str(settings.pop("path", "train.py"))],
        cwd=settings.pop("cwd", folder),
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **settings,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its status and what it said; not before its watcher, which has its stderr, has ended too."""
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def run(folder: Path, statement: str, *words: str, **settings) -> tuple[int, str, str]:
    return ended(started(folder, statement, *words, **settings))


def boxes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "otpbox" in path.name)


def labels(contents: Contents) -> list[str]:
    return [contents.batch.names[name] for name in contents.batch["name"]]


def said_to_be_in(name: str) -> str:
    return f"{DIED}is in {name}: otel-torchprof recover {name}\n"


@pytest.mark.parametrize("how", DEATHS)
def test_a_death_leaves_the_box(tmp_path, capsys, how):
    """However a script dies, its box is saved, for the user alone, and ``recover`` names the label that was open on its thread."""
    statement, status = DEATHS[how]
    found = run(tmp_path, statement, "-q", "--blackbox", "-o", "none", is_new=how == "SIGKILL")
    assert found == (status, "", said_to_be_in("train.otpbox"))
    path = tmp_path / "train.otpbox"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert cli.main(["recover", str(path), "-o", "none"]) == 0
    said = capsys.readouterr().out
    assert " of train.py " in said
    assert re.search(r"thread main \(\d+\): in second for .* s; the last to end was first\n +[\d.]+ s  outer\n", said)
    assert boxes(tmp_path) == ["train.otpbox"]


def test_the_installed_command(tmp_path, capsys):
    """By its own name, which is the system's for the main thread and those that it starts, it takes no thread of the script for one of its own."""
    command = tmp_path / "otel-torchprof"
    command.write_text(f"#!{sys.executable}\nfrom otel_torchprof._cli.main import main\nraise SystemExit(main())\n")
    command.chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT.format(statement=KILL))
    words = [command, "run", "-q", "--blackbox", "-o", "none", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended(
        subprocess.Popen(
            words, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    )
    assert cli.main(["recover", str(tmp_path / "train.otpbox"), "-o", "none"]) == 0
    assert re.search(r"thread main \(\d+\): in second for .* s; the last to end was first\n", capsys.readouterr().out)


@pytest.mark.parametrize("how", ENDS)
def test_an_end_leaves_nothing(tmp_path, how):
    """However a script ends by itself, no box is left, and status and output are those without the flag."""
    expected = run(tmp_path, ENDS[how], "-q", "-o", "none")
    assert run(tmp_path, ENDS[how], "-q", "-o", "none", "--blackbox") == expected
    assert boxes(tmp_path) == []


def test_a_box_is_shown(tmp_path, capsys):
    """``show`` reads a saved box as it reads a trace."""
    run(tmp_path, KILL, "--blackbox", "-o", "none")
    assert cli.main(["show", str(tmp_path / "train.otpbox")]) == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"^ *{name} ", said, re.MULTILINE) for name in ("outer", "first", "second"))


def test_a_death_after_the_main_thread(tmp_path):
    """A thread that works on after the main thread's end is recorded up to the death of the process."""
    body = "lambda: (threading.main_thread().join(), otp.record_function('late').__enter__(), os.abort())"
    status, _, said = run(tmp_path, f"threading.Thread(target={body}).start()", "-q", "--blackbox", "-o", "none")
    assert status == -signal.SIGABRT
    assert said == said_to_be_in("train.otpbox")
    assert sorted(labels(read_box(str(tmp_path / "train.otpbox")))) == ["first", "late", "outer", "second"]


def test_the_script_has_no_child(tmp_path):
    """``os.wait()`` of the script raises: the watcher is nobody's child."""
    _, _, said = run(tmp_path, "os.wait()", "-q", "--blackbox", "-o", "none")
    assert said.endswith("ChildProcessError: [Errno 10] No child processes\n")


@pytest.mark.parametrize("variable", ["", "ops,boxes/"])
def test_the_script_has_its_low_descriptors(tmp_path, variable):
    """What the script opens gets the same descriptors as without the flag, and stays open where it has closed all others."""
    statement = (
        "os.closerange(3, 100); file = open('own.txt', 'w'); file.write('text'); print(file.fileno(), os.dup(0))"
    )
    expected = run(tmp_path, statement, "-q", "-o", "none")
    environment = {"OTEL_TORCHPROF_BLACKBOX": variable}
    assert run(tmp_path, statement, "-q", "-o", "none", "--blackbox", environment=environment) == expected
    assert (tmp_path / "own.txt").read_text() == "text"


@pytest.mark.parametrize("words", [(), ("--blackbox",)])
def test_an_interrupt_of_the_group(tmp_path, words):
    """Ctrl-C, which goes to the whole process group, ends the script as without the flag, and leaves no box."""
    statement = "print('ready', flush=True); sys.stdin.read()"
    process = started(tmp_path, statement, "-q", "-o", "none", *words, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    status, _, said = ended(process)
    assert status == -signal.SIGINT
    assert said.endswith("\nKeyboardInterrupt\n")
    assert said.startswith("Traceback")
    assert boxes(tmp_path) == []


WATCHER = """next(
            int(pid) for pid in os.listdir('/proc') if pid.isdecimal() and int(pid) != os.getpid()
            and os.path.exists(f'/proc/{pid}/cwd') and os.path.samefile(f'/proc/{pid}/cwd', '.'))"""
"""In the script: the other process that is in its folder."""


def test_what_the_watcher_survives(tmp_path):
    """Signals that are meant to end a program do not end its watcher, nor does one that kills the program's process group."""
    signals = "(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)"
    statement = (
        f"pid = {WATCHER}\n        for each in {signals}: os.kill(pid, each)\n        os.killpg(0, signal.SIGKILL)"
    )
    found = run(tmp_path, statement, "-q", "--blackbox", "-o", "none", start_new_session=True)
    assert found == (-signal.SIGKILL, "", said_to_be_in("train.otpbox"))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this interpreter was built for an older system")
@pytest.mark.parametrize(("ended_by", "expected"), [(signal.SIGTERM, True), (signal.SIGKILL, False)])
def test_how_a_process_ended(ended_by, expected):
    """SIGTERM is recognized before and after the parent has asked for the status, also where another process has the number then."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    pidfd = os.pidfd_open(process.pid)
    try:
        process.send_signal(ended_by)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended_by_sigterm(process.pid, pidfd) is expected
        process.wait()
        assert ended_by_sigterm(process.pid, pidfd) is (expected and KERNEL >= (6, 15))
        assert ended_by_sigterm(os.getpid(), pidfd) is (
            expected and KERNEL >= (6, 15)
        )  # as if the number were used again
    finally:
        os.close(pidfd)


def test_the_watcher_has_none_of_the_programs_pipes(tmp_path):
    """Whoever reads what the script writes sees its end when the script closes it, and so does who waits for another pipe."""
    reader, writer = os.pipe()
    statement = f"os.close(1); os.close({writer}); sys.stdin.read()"
    process = started(tmp_path, statement, "-q", "--blackbox", "-o", "none", pass_fds=[writer])
    os.close(writer)
    assert process.stdout is not None
    for pipe in (process.stdout.fileno(), reader):
        assert select.select([pipe], [], [], SECONDS)[0]
        assert os.read(pipe, 1) == b""
    os.close(reader)
    ended(process)


def test_a_folder_that_cannot_be_written(tmp_path):
    """The line says that the box could not be saved, where, and why; the script's status is its own."""
    settings = {"cwd": "/sys", "path": tmp_path / "train.py"}
    status, _, said = run(tmp_path, KILL, "-q", "--blackbox", "-o", "none", **settings)
    assert status == -signal.SIGKILL
    assert re.fullmatch(rf"{DIED}could not be saved as /sys/train\.otpbox: .+\n", said)


def test_a_folder_that_is_gone(tmp_path):
    """Likewise where the working directory has been removed."""
    folder = tmp_path / "gone"
    folder.mkdir()
    settings = {"cwd": folder, "path": tmp_path / "train.py"}
    _, _, said = run(tmp_path, f"os.rmdir(os.getcwd()); {KILL}", "-q", "--blackbox", "-o", "none", **settings)
    assert said == f"{DIED}could not be saved as train.otpbox: No such file or directory\n"


def test_a_file_of_that_name(tmp_path):
    """The box of an earlier death is replaced, that of a process which still writes it is left alone."""
    path = tmp_path / "train.otpbox"
    path.write_bytes(b"of an earlier death")
    run(tmp_path, KILL, "-q", "--blackbox", "-o", "none")
    assert labels(read_box(str(path))) == ["outer", "first", "second"]
    path.write_bytes(b"of another process")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        process = started(tmp_path, KILL, "-q", "--blackbox", "-o", "none")
        assert ended(process)[2] == said_to_be_in(f"train.{process.pid}.otpbox")
    assert path.read_bytes() == b"of another process"
    assert boxes(tmp_path) == [f"train.{process.pid}.otpbox", "train.otpbox"]


def test_two_ranks(tmp_path):
    """Each of two ranks has a box of its own, with its rank in the name and in what ``recover`` says."""
    for rank in ("0", "1"):
        ranks = {"RANK": rank, "WORLD_SIZE": "2"}
        said = said_to_be_in(f"train.rank{rank}.otpbox").replace("the program", f"rank {rank}").rstrip()
        compare = "; to compare the ranks: otel-torchprof autopsy ."
        assert run(tmp_path, KILL, "-q", "--blackbox", environment=ranks)[2] == f"{said}{compare}\n"
    assert boxes(tmp_path) == ["train.rank0.otpbox", "train.rank1.otpbox"]
    assert read_box(str(tmp_path / "train.rank1.otpbox")).info["rank"] == 1


def test_the_variable_alone(tmp_path):
    """Where only the environment requests a box there is one: of its detail and size, in memory that is saved."""
    found = run(tmp_path, KILL, "-q", "-o", "none", environment={"OTEL_TORCHPROF_BLACKBOX": "ops,2M"})
    assert found[2] == said_to_be_in("train.otpbox")
    assert (tmp_path / "train.otpbox").stat().st_size == 2 << 20
    assert labels(read_box(str(tmp_path / "train.otpbox"))) == ["outer", "first", "second"]


READ = """
from otel_torchprof._files.box import latest_events
from otel_torchprof._files.box_file import box_of

def read():
    found = latest_events()
    names = found and {found.batch.names[name] for name in found.batch["name"]}
    print(box_of(os.getpid()) is not None, names and {"outer", "second"} <= names, flush=True)
"""


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("read()", "True True\n"),
        ("os.fork() or (read(), os._exit(0)); os.wait()", "False None\n"),
        ("[os.dup2(0, number) for number in range(100, 300)]; read(); os.fstat(200)", "False None\n"),
    ],
    ids=["running", "forked", "whose descriptors are others"],
)
def test_the_box_of_a_script_is_found(tmp_path, statement, expected):
    """``top`` and ``dump`` find the box of a running script; a forked child has none, nor one that has put its own files there."""
    quiet = "import warnings; warnings.simplefilter('ignore', DeprecationWarning)"  # of forks beside threads, since Python 3.12
    found = run(tmp_path, f"{quiet}; exec({READ!r}); {statement}", "-q", "-o", "none", "--blackbox")
    assert found == (0, expected, "")


@pytest.mark.parametrize(("statement", "is_left"), [(KILL, True), ("pass", False)])
def test_a_named_folder(tmp_path, statement, is_left):
    """A box in a folder that the environment names survives there by itself; its detail is the run's where the flag is given."""
    folder = tmp_path / "boxes"
    variable = {"OTEL_TORCHPROF_BLACKBOX": f"steps,{folder}"}
    _, _, said = run(tmp_path, statement, "-q", "-o", "none", "--blackbox", environment=variable)
    assert said == ""
    found = list(folder.iterdir())
    assert [labels(read_box(str(path))) for path in found] == ([["outer", "first", "second"]] if is_left else [])
    assert boxes(tmp_path) == []


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_a_box_that_cannot_be_had(tmp_path):
    """Where there is no memory for a box it is said once, with the way out, and the script runs."""
    found = run(tmp_path, "print('runs')", "-q", "-o", "none", "--blackbox", preexec_fn=_small_files, is_new=True)
    assert found[:2] == (0, "runs\n")
    assert re.fullmatch(
        r"otel-torchprof: no black box is kept: memory .*; name a folder for it: OTEL_TORCHPROF_BLACKBOX=ops,/a/folder\n",
        found[2],
    )


def test_a_second_box(tmp_path):
    """A box that the script opens itself beside that of the command is refused and said, and the script runs."""
    statement = (
        "from otel_torchprof._files.box import BlackBox; from otel_torchprof.parsers import black_box\n"
        "        second = BlackBox(black_box('ops')); second.start(); print(second.state)"
    )
    _, out, said = run(tmp_path, statement, "-q", "-o", "none", "--blackbox")
    assert out.startswith("off: ")
    assert said.count("no black box is kept: ") == 1
    assert boxes(tmp_path) == []


def test_the_first_process_of_a_container(tmp_path):
    """As process 1, which nothing outlives, the script runs without a box, has no child, and it is said what helps."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespace of processes can be made")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(statement="print(os.getpid())"))
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "otel_torchprof", "run", "-q", "-o", "none", "--blackbox", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=SECONDS,
    )
    assert done.stdout == "1\n"
    assert (
        "no black box is kept: no process outlives the first one of a container; name a folder for it: " in done.stderr
    )


@pytest.mark.parametrize(
    "before",
    [
        "del os.memfd_create, os.pidfd_open",  # as uv's interpreters
        "sys.frozen = True",  # the watcher stays what it was forked as
        "os.close(0)",
        "os.closerange(0, 2)",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    ],
)
def test_unusual_interpreters(tmp_path, before):
    """The box is saved likewise where the interpreter lacks system calls, is frozen or ignores children, or streams are closed."""
    code = f"import os, signal, sys; {before}; from otel_torchprof._cli.main import main; sys.exit(main())"
    status, _, said = run(tmp_path, KILL, "-q", "--blackbox", "-o", "none", start=("-c", code), is_new=True)
    assert (status, said) == (-signal.SIGKILL, said_to_be_in("train.otpbox"))
    assert labels(read_box(str(tmp_path / "train.otpbox"))) == ["outer", "first", "second"]


def test_without_stderr(tmp_path):
    """Where stderr is closed from the beginning the box is whole all the same: the line goes nowhere, into no file."""
    code = "import os, sys; os.close(2); from otel_torchprof._cli.main import main; sys.exit(main())"
    statement = f"print({WATCHER}, flush=True); sys.stdin.read(); {KILL}"
    process = started(tmp_path, statement, "-q", "--blackbox", "-o", "none", start=("-c", code))
    assert process.stdout is not None
    watcher = os.pidfd_open(int(process.stdout.readline()))
    assert ended(process) == (-signal.SIGKILL, "", "")
    assert select.select([watcher], [], [], SECONDS)[0]
    os.close(watcher)
    assert labels(read_box(str(tmp_path / "train.otpbox"))) == ["outer", "first", "second"]


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        ([], "", None),
        (["--blackbox"], "", BlackBoxOptions("ops")),
        (["--blackbox", "--detail", "steps"], "", BlackBoxOptions("steps")),
        (["--blackbox", "--detail", "modules"], "", BlackBoxOptions("steps")),
        (["--blackbox", "--detail", "frames"], "", BlackBoxOptions("ops")),
        (["--blackbox", "--detail", "steps", "--stacks"], "", BlackBoxOptions("ops")),
        (["--blackbox"], "steps,/a/b,8M", BlackBoxOptions("ops", "/a/b", 8 << 20)),
        ([], "steps,8M", BlackBoxOptions("steps", "", 8 << 20)),
    ],
)
def test_what_is_requested(monkeypatch, words, variable, expected):
    """The flag takes its detail from the run's, and folder and size from the variable, which alone says all of it."""
    monkeypatch.setenv("OTEL_TORCHPROF_BLACKBOX", variable)
    options = cli._parser().parse_args(["run", *words, "x.py"])
    assert options_of(options) == expected
    monkeypatch.setenv("OTEL_TORCHPROF_ENABLED", "false")
    assert options_of(options) is None


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ([], {}, "x.otpbox"),
        (["-o", "none"], {}, "x.otpbox"),
        (["-o", "otlp", "-o", "a/t.otlp", "-o", "b/t.json"], {}, "a/x.otpbox"),
        (["-o", "/a/{rank}/t.json"], {"RANK": "2", "WORLD_SIZE": "4"}, "/a/2/x.rank2.otpbox"),
    ],
)
def test_where_it_is_saved(monkeypatch, words, environ, expected):
    """Beside the first file that is written, else in the working directory, with the rank in its name."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert box_name(cli._parser().parse_args(["run", *words, "x.py"]), "x") == expected


def test_launchers_hand_the_flag_on():
    """Ranks are given the flag, where the command was."""
    parse = cli._parser().parse_args
    assert "--blackbox" in _words_of(parse(["run", "--nproc", "2", "--blackbox", "x.py"]))
    assert "--blackbox" not in _words_of(parse(["run", "--nproc", "2", "x.py"]))
