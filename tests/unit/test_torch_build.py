"""Building, keeping, refusing and loading the library that records torch's operators."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import preloaded
import pytest

torch = pytest.importorskip("torch", minversion="2.6")

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._cli import main as cli  # noqa: E402
from otel_torchprof._native import torch_build  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
PROFILES = (
    "import torch, otel_torchprof as otp\n"
    "with otp.profile() as prof: torch.ones(3).neg()\n"
    "assert 'aten::neg' in [event.name for event in prof.events()]\n"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the library, built by the first of this module that needs it."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(torch_build.ensure(torch).parent, folder / "kept")
    return folder / "kept"


@pytest.fixture
def kept(built, tmp_path, monkeypatch):
    """A folder of the test's own that holds the library, and is the one in use."""
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    for path in built.glob(f"{Path(torch_build.library_name(torch)).stem}*"):
        shutil.copy2(path, folder)
    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", str(folder))
    return folder


def python(program, **environment):
    """Runs a program in a process of its own, which has torch and this package, but no library."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return preloaded.run(program, environment=variables, has_package=True)


def test_what_is_kept_is_used(kept, capfd):
    """A library that is there is neither built again nor announced."""
    before = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    path = torch_build.ensure(torch)
    assert path.parent == kept
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == before
    assert capfd.readouterr().err == ""


DAMAGES = {
    "cut": lambda library: library.write_bytes(library.read_bytes()[:5000]),
    "garbage": lambda library: library.write_bytes(b"garbage" * 1000),
    "empty": lambda library: library.write_bytes(b""),
    "no digest": lambda library: library.with_suffix(".sha256").unlink(),
    "digest of another": lambda library: library.with_suffix(".sha256").write_text("0" * 64),
    "gone": lambda library: library.unlink(),
}


@pytest.fixture
def quick_compiler(built, monkeypatch):
    """Stands for the compiler: hands out what was built before, as a compiler that is asked twice would."""
    made = built / torch_build.library_name(torch)

    def compile_quickly(commands, output):
        for command in commands:
            shutil.copyfile(made, command[command.index("-o") + 1])
        return compile_nothing(commands, output)

    monkeypatch.setattr(torch_build, "_run_compilers", compile_quickly)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.usefixtures("quick_compiler")
def test_damage_is_repaired(kept, built, damage, capfd):
    """Whatever happened to the kept library, it is built again instead of being loaded, and that is said."""
    library = kept / torch_build.library_name(torch)
    DAMAGES[damage](library)
    assert not torch_build.is_whole(library)
    assert torch_build.ensure(torch) == library
    assert library.read_bytes() == (built / library.name).read_bytes()
    said = capfd.readouterr().err
    assert ("building, once" if damage == "gone" else "damaged: building again") in said


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(kept, mode):
    """Nothing is loaded from a folder that group or others can write to; the message says what to do."""
    kept.chmod(mode)
    with pytest.raises(otp.TorchLibraryError, match=rf"can be written by others \(mode {mode:o}\).*chmod go-w"):
        torch_build.ensure(torch)


@pytest.fixture
def somebody(kept, monkeypatch):
    """Somebody who is not root, since root can write to a read-only folder, and who owns what is kept."""
    name = torch_build.library_name(torch)
    monkeypatch.setattr(torch_build, "library_name", lambda _: name)  # the checkout may be for root's eyes only
    if os.geteuid() != 0:
        yield
        return
    for path in (kept, *kept.iterdir()):
        os.chown(path, 65534, -1)
    reachable = Path(tempfile.mkdtemp())
    reachable.chmod(0o711)
    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", str(shutil.move(kept, reachable)))
    os.seteuid(65534)
    yield
    os.seteuid(0)
    shutil.rmtree(reachable)


@pytest.mark.usefixtures("somebody")
def test_a_read_only_folder():
    """A folder that cannot be written is used when the library is in it, and named when it is not."""
    folder = torch_build.folder()
    folder.chmod(0o500)
    library = torch_build.ensure(torch)
    assert library.parent == folder
    folder.chmod(0o700)
    library.unlink()
    folder.chmod(0o500)
    with pytest.raises(otp.TorchLibraryError, match=r"cannot be written.*OTEL_TORCHPROF_BUILD_DIR"):
        torch_build.ensure(torch)


@pytest.mark.parametrize("folder", ["/proc/nothing/here", "/dev/null/below"])
def test_a_folder_that_cannot_be_made(monkeypatch, folder):
    """A folder that cannot be made is named, with the variable to set."""
    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", folder)
    with pytest.raises(otp.TorchLibraryError, match=rf"{folder} cannot be written .*OTEL_TORCHPROF_BUILD_DIR"):
        torch_build.ensure(torch)


def test_no_home(monkeypatch):
    """A user without a home is told which variable to set."""
    for name in ("OTEL_TORCHPROF_BUILD_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(otp.TorchLibraryError, match=r"neither HOME nor XDG_CACHE_HOME.*OTEL_TORCHPROF_BUILD_DIR"):
        torch_build.folder()


def test_where_it_is_kept(monkeypatch, tmp_path):
    """The named folder comes first, then the user's cache folder."""
    monkeypatch.delenv("OTEL_TORCHPROF_BUILD_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert torch_build.folder() == tmp_path / "otel_torchprof"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert torch_build.folder() == tmp_path / ".cache" / "otel_torchprof"


def test_no_compiler(tmp_path):
    """Without a compiler the error names the ways out, and labels alone still work."""
    done = python(
        "import torch, otel_torchprof as otp\n"
        "for operators in (None, True):\n"
        "    try: otp.profile(operators=operators)\n"
        "    except otp.TorchLibraryError as error: print(error)\n"
        "with otp.profile(operators=False) as prof, otp.record_function('label'): pass\n"
        "print(prof.events()[0].name)\n",
        PATH=str(tmp_path),
        CXX="",
        OTEL_TORCHPROF_BUILD_DIR=str(tmp_path / "new"),
    )
    assert done.returncode == 0, done.stderr
    first, second, label = done.stdout.splitlines()
    assert first == second
    for hint in ("apt install g++", "conda install", "otel-torchprof build", "profile(operators=False)"):
        assert hint in first
    assert label == "label"
    assert "building" not in done.stderr  # it was not begun


BAD_COMPILERS = {
    "fails": (
        "#!/bin/sh\necho 'fatal: out of ideas' >&2\nexit 3\n",
        ["exit status 3", "fatal: out of ideas", "torch/ops.cc"],
    ),
    "says no text": ("#!/bin/sh\nprintf 'caf\\351' >&2\nexit 1\n", ["exit status 1", "caf\ufffd"]),
    "cannot be run": ("\x7fELFno", ["could not be run", "CXX"]),
    "makes nothing": ("#!/bin/sh\nexit 0\n", ["could not be loaded"]),
}


@pytest.mark.parametrize("kind", BAD_COMPILERS)
def test_a_bad_compiler(tmp_path, monkeypatch, kind):
    """A compiler that fails is shown with its command and what it said; nothing is left lying around."""
    text, expected = BAD_COMPILERS[kind]
    compiler = tmp_path / "compiler"
    compiler.write_bytes(text.encode("latin-1"))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", str(tmp_path / "new"))
    from otel_torchprof._native import torch_library

    with pytest.raises(otp.TorchLibraryError) as raised:
        torch_library.TorchLibrary(torch_build.ensure(torch, announce=False))
    for part in expected:
        assert part in str(raised.value)
    assert not list((tmp_path / "new").glob("*.building"))


def compile_nothing(commands, _output):
    """Stands for the compiler, and finds no errors."""
    return [subprocess.CompletedProcess(command, 0, "", "") for command in commands]


def test_a_full_disk(tmp_path, monkeypatch):
    """A disk that is full while the library is written is named as such."""
    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(torch_build, "_digest_file", lambda path: Path("/dev/full"))
    monkeypatch.setattr(torch_build, "_run_compilers", compile_nothing)
    with pytest.raises(otp.TorchLibraryError, match="could not be written: No space left"):
        torch_build.ensure(torch, announce=False)


def test_what_nobody_uses_goes(tmp_path, monkeypatch):
    """A build removes libraries that were asked for three months ago, with all that belongs to them, and nothing else."""
    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", str(tmp_path))
    (tmp_path / "notes.so").touch()
    for name, days in (("torch_ops-2.6.0[a]", 100), ("torch_ops-2.7.0", 80)):
        for suffix in (".so", ".sha256", ".no_memory"):
            (tmp_path / f"{name}{suffix}").touch()
        os.utime(tmp_path / f"{name}.so", (0, time.time() - days * 86400))
    path = tmp_path / torch_build.library_name(torch)
    monkeypatch.setattr(torch_build, "_run_compilers", compile_nothing)
    assert torch_build.ensure(torch, announce=False) == path
    left = {found.name for found in tmp_path.iterdir() if found.stem != path.stem}
    assert left == {"notes.so", *(f"torch_ops-2.7.0{suffix}" for suffix in (".so", ".sha256", ".no_memory"))}


def test_use_is_noted(tmp_path, monkeypatch):
    """A library that was last asked for long ago is young again once it is asked for."""
    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(torch_build, "_run_compilers", compile_nothing)
    path = torch_build.ensure(torch, announce=False)
    os.utime(path, (0, 0))
    torch_build.ensure(torch, announce=False)
    assert path.stat().st_mtime > time.time() - 86400


WITHOUT_MEMORY = """
import torch, otel_torchprof as otp
from otel_torchprof._native import torch_ranges

with otp.profile() as prof:
    torch.ones(2).neg()
assert "aten::neg" in [event.name for event in prof.events()]
torch_ranges.ranges()
for _ in range(2):
    try:
        otp.profile(profile_memory=True).start()
    except otp.TorchLibraryError as error:
        print(error)
with otp.profile() as prof:
    torch.ones(2).neg()
assert "aten::neg" in [event.name for event in prof.events()]
"""


# It refuses at once what has the part in it. The rest it compiles, in a third less time without optimising it, and keeps: the files'
# names say what they depend on, and from the same sources the same comes out.
NO_SUCH_SLOT = """#!/bin/sh
case "$*" in *torch/memory.cc*) echo 'torch/memory.cc:1: error: #error this torch has no such slot' >&2; exit 1;; esac
for output; do :; done
kept={kept}/without_memory-${{output##*/}}
if [ ! -e "$kept" ]; then
    {compiler} "$@" -O0 || exit
    cp "$output" "$kept.$$" && exec mv "$kept.$$" "$kept"
fi
exec cp "$kept" "$output"
"""


def compiler(folder, text):
    """A program that stands before the compiler, or for it."""
    path = folder / "compiler"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_part_that_does_not_compile(tmp_path):
    """Where torch's memory slot is another one, operators and ranges are there without it, and profile_memory says why."""
    kept = ROOT / "build" / "torch_build"
    kept.mkdir(parents=True, exist_ok=True)
    refuses = compiler(tmp_path, NO_SUCH_SLOT.format(compiler=torch_build.compiler(), kept=kept))
    done = python(WITHOUT_MEMORY, OTEL_TORCHPROF_BUILD_DIR=str(tmp_path / "new"), CXX=refuses)
    assert done.returncode == 0, done.stderr
    assert "memory cannot be recorded: torch/memory.cc did not compile against this torch" in done.stderr
    assert done.stdout.count("did not compile against the torch that is installed") == 2
    assert done.stdout.count("error: #error this torch has no such slot") == 2


@pytest.fixture
def attempts(monkeypatch):
    """Stands for the compiler: tells, by the words of a command, what has errors in it; a list of what was compiled each time."""
    compiled, broken = [], []

    def compile_some(commands, _output):
        return [compile_one(command) for command in commands]

    def compile_one(command):
        text = " ".join(command)
        if "torch/ops.cc" in text:
            compiled.append(text)
        errors = [f"torch/{name}.cc:3: error" for name, word in broken if f"torch/{name}.cc" in text and word in text]
        return subprocess.CompletedProcess(command, bool(errors), "", "\n".join(errors))

    monkeypatch.setattr(torch_build, "_run_compilers", compile_some)
    monkeypatch.setattr(torch_build, "compiler", lambda: "c++")
    return compiled, broken


def compile_what_can_be(tmp_path):
    return torch_build._compile_possible(torch_build.BuildTarget.of(torch), tmp_path / "library.so")


@pytest.mark.parametrize(("names", "runs"), [(("devices", "ranges"), 2), (("ops",), 1), (("ops", "memory"), 2)])
def test_few_attempts(attempts, tmp_path, names, runs):
    """All parts with errors are left out at once, and nothing is tried again where the errors are in what cannot be left out."""
    compiled, broken = attempts
    broken += [(name, "") for name in names]
    if "ops" in names:
        with pytest.raises(otp.TorchLibraryError, match=r"torch/ops\.cc:3: error"):
            compile_what_can_be(tmp_path)
    else:
        assert compile_what_can_be(tmp_path)[0] == ("torch/devices.cc", "torch/ranges.cc")
    assert len(compiled) == runs


@pytest.mark.parametrize(("word", "left_out", "runs"), [("/lighter", (), 2), ("", (torch_build.COLLECTIVES,), 3)])
def test_collectives_with_all_headers(attempts, tmp_path, word, left_out, runs):
    """Where c10d's headers use an operator that the stand-in does not have, all of torch's headers are taken, before collectives go."""
    compiled, broken = attempts
    broken.append(("collectives", word))
    assert compile_what_can_be(tmp_path)[0] == left_out
    assert len(compiled) == runs


@pytest.mark.parametrize(("cores", "alone"), [(1, False), (2, True)])
def test_units(attempts, tmp_path, monkeypatch, cores, alone):
    """Where there are two cores, two units share the sources; where there is one, one unit has them all."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    compile_what_can_be(tmp_path)
    (unit,) = attempts[0]
    assert ("torch/collectives.cc" not in unit) == alone


# Hands out what was built before, once all processes want it: until then none can find it there.
WAITS_FOR_ALL = """#!/bin/sh
case "$*" in *-shared*)
    echo linked >>{folder}/runs
    timeout 300 head -n 3 {folder}/ready >/dev/null || exit 1
esac
while [ "$1" != -o ]; do shift; done
cp {made} "$2"
"""


def test_several_processes_build_once(tmp_path, built):
    """Of three processes that want it at once with nothing built, one builds and all record."""
    ready, made = tmp_path / "ready", built / torch_build.library_name(torch)
    os.mkfifo(ready)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OTEL_TORCHPROF_BUILD_DIR": str(tmp_path / "shared"),
        "CXX": compiler(tmp_path, WAITS_FOR_ALL.format(folder=tmp_path, made=made)),
    }
    program = f"import torch\nwith open({str(ready)!r}, 'w') as file: file.write('here\\n')\n{PROFILES}"
    with ready.open("r+b", buffering=0):  # so that it has no end before all have written
        running = [
            subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environment)
            for _ in range(3)
        ]
        said = [process.communicate(timeout=600)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 3, said
    assert sum("built in" in text for text in said) == 1
    assert (tmp_path / "runs").read_text() == "linked\n"
    assert (tmp_path / "shared").stat().st_mode & 0o077 == 0o055


SWAPPED = """
import torch
from otel_torchprof._native import torch_build
path, opened = torch_build.ensure(torch), torch_build.open_private
torch_build.ensure = lambda torch: path

def open_then_swap(path):
    descriptor = opened(path)
    path.rename(path.with_suffix(".checked"))
    path.write_bytes(b"what somebody else put there")
    return descriptor

torch_build.open_private = open_then_swap
"""
NO_PROC = """
import os
from pathlib import Path
from otel_torchprof._native import torch_library
os.path.samestat = lambda one, other: False
descriptor = os.open("/dev/null", os.O_RDONLY)
assert torch_library._name_of(descriptor, Path("library.so")) == "library.so"
"""
REPLACED = f"""
{PROFILES}
import shutil
from otel_torchprof._native import torch_library, torch_ranges
first = torch_library.load()
copied = first.path.with_suffix(".copy")
shutil.copy(first.path, copied)
copied.replace(first.path)
torch_library._loading = torch_library._Loading()
assert torch_library.load() is not first
torch_ranges.ranges()
"""


@pytest.mark.parametrize("circumstance", [SWAPPED, NO_PROC, REPLACED], ids=["swapped", "no proc", "replaced"])
def test_what_was_checked_is_loaded(kept, circumstance):
    """Whatever has the path after the check, where there is no /proc, and where another file had the path before."""
    done = python(circumstance + PROFILES, OTEL_TORCHPROF_BUILD_DIR=str(kept), PATH="", CXX="")
    assert (done.returncode, done.stderr) == (0, "")


def test_build_ahead_of_time(kept, capsys):
    """`otel-torchprof build --dir` proves the library and prints its path, and another process finds it there."""
    assert cli.main(["build", "--dir", str(kept)]) == 0
    assert capsys.readouterr().out.strip() == str(kept / torch_build.library_name(torch))
    done = python(PROFILES, OTEL_TORCHPROF_BUILD_DIR=str(kept), PATH="", CXX="")
    assert (done.returncode, done.stderr) == (0, "")


def test_build_says_what_is_wrong(kept, capsys):
    """`otel-torchprof build` fails with status 1 and one message."""
    kept.chmod(0o777)
    assert cli.main(["build", "--dir", str(kept)]) == 1
    assert capsys.readouterr().err.startswith(f"otel-torchprof: {kept} can be written by others")


def test_version(capsys):
    """`otel-torchprof --version` prints the package's version."""
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"otel-torchprof {otp.__version__}\n"


def test_the_name_says_what_it_depends_on(monkeypatch):
    """Another torch, other sources or other flags have another file."""
    names = {torch_build.library_name(torch)}
    monkeypatch.setattr(torch_build, "_FLAGS", ("-O3",))
    names.add(torch_build.library_name(torch))
    monkeypatch.setattr(torch_build, "source_files", lambda: [Path(__file__)])
    names.add(torch_build.library_name(torch))
    monkeypatch.setattr(torch.version, "git_version", "another")
    names.add(torch_build.library_name(torch))
    assert len(names) == 4
