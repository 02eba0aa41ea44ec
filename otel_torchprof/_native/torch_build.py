"""Builds the library that records torch's operators, against the installed torch, and caches it.

Kept per torch version, interpreter, platform and source hash. Where: ``OTEL_TORCHPROF_BUILD_DIR``, else the user's cache
folder. A folder that another user could replace or write to is never used, since what lies there is loaded into the process.

Functions import what torch brings: hashlib, tempfile and the like take longer than all of this folder, and are there with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof import config
from otel_torchprof.errors import TorchLibraryError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Between operators the recording code leaves the caches. Without alignment gaps it occupies fewer cache lines: begin and end take
# 26 ns instead of 31 more than an empty callback (additions in C++, means of the medians of four and eight processes).
_PACKED = ("-falign-functions=64", "-falign-jumps=1", "-falign-loops=1", "-falign-labels=1")
_FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fno-plt", *_PACKED)
"""-DNDEBUG is part of the contract: without it torch's header checks a field that release builds never set, and reading
inputs throws. Never -march=native: an image is built on one machine and runs on another."""

_COMPILE_SECONDS = 300.0

_KEPT_SECONDS = 90 * 86400.0
_DAY = 86400.0

COLLECTIVES = "torch/collectives.cc"

_SECOND_UNIT = (COLLECTIVES, "torch/memory.cc", "torch/record_function_fast.cc")
"""Sources of the second compilation unit, compiled in parallel if there is another core. Two units, since torch's headers take most of the time."""

OPTIONAL = {
    COLLECTIVES: "collectives have no groups, numbers and sizes",
    "torch/devices.cc": "devices cannot be timed",
    "torch/memory.cc": "memory cannot be recorded",
    "torch/ranges.cc": "operators cannot be shown as ranges",
    "torch/record_function_fast.cc": "kernels and phases of torch.compile are not recorded",
}
"""Sources that use more of torch than its operators, by their name in compiler messages. If one does not compile, the library is built
without it."""


def _sources() -> Path:
    """Folder with ``include/`` and ``src/sources/``: inside the package, or ``native/`` of a checkout."""
    here = Path(__file__).resolve().parent
    inside = here / "sources"
    return inside if inside.is_dir() else here.parent.parent / "native"


def source_files() -> list[Path]:
    """All sources of the library, without torch's headers."""
    root = _sources()
    return sorted([*root.glob("include/*/**/*.h"), *root.glob("src/sources/torch/*")])


def _name(source: Path) -> str:
    """Returns folder and name of a source."""
    return f"{source.parent.name}/{source.name}"


def sources_digest() -> str:
    """Digest of the sources and of the compiler's flags."""
    import hashlib

    digest = hashlib.sha256(repr(_FLAGS).encode())
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class BuildTarget(NamedTuple):
    """A torch that the library is compiled against."""

    version: str
    git_version: str
    cxx11_abi: int
    include: Path
    libraries: Path
    """Folder of ``libtorch_cpu`` and ``libc10``."""
    has_distributed: bool = True

    @classmethod
    def of(cls, torch: Any) -> BuildTarget:
        """Returns the target for the installed torch."""
        root = Path(torch.__file__).parent
        return cls(
            torch.__version__,
            torch.version.git_version,
            int(torch.compiled_with_cxx11_abi()),
            root / "include",
            root / "lib",
            torch.distributed.is_available(),
        )


def library_name(torch: Any) -> str:
    """Returns the name of the library's file, which contains everything that it depends on."""
    target = BuildTarget.of(torch)
    import hashlib

    digest = hashlib.sha256(repr((sources_digest(), target.git_version, target.cxx11_abi)).encode())
    tag = f"{sys.implementation.cache_tag}-{sys.platform}-{platform.machine()}"
    return f"torch_ops-{torch.__version__}-{tag}-{digest.hexdigest()[:16]}.so"


def folder() -> Path:
    """Folder of the built libraries."""
    chosen: Path | None = config.BUILD_DIR.read()
    if chosen is not None:
        return chosen
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    except RuntimeError as error:  # a user id without a name, and no HOME: usual in containers
        raise TorchLibraryError(
            "there is no place to keep the library that records torch operators: neither HOME nor XDG_CACHE_HOME is set; set "
            f"{config.BUILD_DIR} to a folder that can be written"
        ) from error
    return base / "otel_torchprof"


def _owners_of_parents() -> set[int]:
    """Returns the user ids that may own a parent of the library's folder: the process's and root's.

    In a user namespace without root (Apptainer, bubblewrap), root's folders appear as those of the overflow user. Only a
    parent may be such a folder: its owner could move the library's folder, but not put a file of this user or root into it.
    """
    owners = {os.geteuid(), 0}
    with contextlib.suppress(OSError):
        mapped = [line.split()[0] for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if "0" not in mapped:
            owners.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return owners


def _require_private(path: Path, info: os.stat_result, *, is_parent: bool) -> None:
    if info.st_uid not in (_owners_of_parents() if is_parent else {os.geteuid(), 0}):
        raise TorchLibraryError(
            f"{path} belongs to user id {info.st_uid}, not to you ({os.geteuid()}) or root: nothing is loaded from it; "
            f"set {config.BUILD_DIR} to a folder of your own"
        )
    # With the sticky bit, other users can create files, but not move or remove this user's.
    is_sticky = is_parent and info.st_mode & stat.S_ISVTX
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        raise TorchLibraryError(
            f"{path} can be written by others (mode {stat.S_IMODE(info.st_mode):o}): nothing is loaded from it; "
            f"run `chmod go-w {path}` or set {config.BUILD_DIR} to a folder of your own"
        )


def _open(path: Path, flags: int, above: int | None, *, is_parent: bool = False) -> int:
    """Opens a file or folder in the folder ``above`` and checks it; returns the descriptor."""
    name = path.name or path.anchor
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        _require_private(path, os.fstat(descriptor), is_parent=is_parent)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_folder(path: Path) -> int:
    """Opens a folder that no other user can write to, replace or move; returns the descriptor.

    Links in the path are resolved first; then each folder from the root on is opened from the one above and checked itself.
    """
    real = Path(os.path.realpath(path))
    flags = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)  # O_PATH: a parent may be unreadable
    above = _open(Path(real.anchor), flags, None, is_parent=True)
    for place in (*reversed(real.parents), real)[1:]:
        try:
            descriptor = _open(place, flags, above, is_parent=place != real)
        finally:
            os.close(above)
        above = descriptor
    return above


def open_private(path: Path) -> int:
    """Opens a file that no other user can write to or replace; returns the descriptor, to use instead of the path.

    Raises:
        TorchLibraryError: another user can; names the file or folder, its owner or mode, and the fix.
        OSError: it does not exist or cannot be read.
    """
    folder = _open_folder(path.parent)
    try:
        descriptor = _open(path, os.O_RDONLY | os.O_NONBLOCK, folder)  # without blocking, in case it is a pipe
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TorchLibraryError(f"{path} is no regular file: nothing is loaded from it; remove it")
    return descriptor


def _make_folder(path: Path) -> None:
    import tempfile

    # A folder named by the user may be shared with other users of the machine or image, so they may read it.
    mode = 0o755 if config.BUILD_DIR.read() else 0o700
    try:
        for place in (*reversed(path.parents), path):  # one by one: mkdir(parents=True) gives parents the umask's mode
            place.mkdir(mode=mode, exist_ok=True)
        os.close(_open_folder(path))
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise TorchLibraryError(
            f"the library that records torch operators is not built yet, and {path} cannot be written ({error.strerror}); "
            f"set {config.BUILD_DIR} to a folder that can, or build ahead of time with `otel-torchprof build`"
        ) from error


@contextlib.contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    """Lets one process build at a time; the others wait for it and use its result.

    Does not use ``flock``: a child forked meanwhile would share the lock, and wait for itself.
    """
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def compiler() -> str:
    """Returns the C++ compiler.

    Raises:
        TorchLibraryError: there is none; says where to get one.
    """
    import shutil

    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise TorchLibraryError(
        "recording torch operators needs a C++ compiler once, to build a small library against the installed torch, and none "
        "of $CXX, c++, g++, clang++ was found. Install one (Debian: `apt install g++`, conda: `conda install cxx-compiler`), "
        "or build where there is one with `otel-torchprof build` and carry the folder here "
        f"({config.BUILD_DIR}). Labels work without it: profile(operators=False)."
    )


def include_folders(include: Path) -> tuple[Path, Path]:
    """Include folders for torch's headers, given torch's ``include`` folder."""
    return include, include / "torch/csrc/api/include"


def _compiling(target: BuildTarget, sources: list[Path], output: Path, *, lighter: bool) -> list[str]:
    """Returns the command that compiles sources as one unit; ``lighter``: with only a few of torch's headers."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={target.cxx11_abi}"
    own = _sources() / "include"
    folders = (own, *([own / "lighter"] if lighter else []), *include_folders(target.include))
    includes = [f"-I{folder}" for folder in folders]
    unit = [*(word for path in sources for word in ("-include", str(path))), "-x", "c++", os.devnull]
    # Without warnings, so that all output is errors.
    return [compiler(), *_FLAGS, "-w", abi, *includes, *unit, "-c", "-o", str(output)]


def _linking(target: BuildTarget, objects: list[Path], output: Path) -> list[str]:
    # --no-as-needed: names torch's libraries even if it is linked with empty ones, as in native/prebuild.py.
    options = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-Wl,--no-as-needed"]
    libraries = [*options, f"-L{target.libraries}", "-ltorch_cpu", "-lc10"]
    return [compiler(), "-shared", *map(str, objects), *libraries, "-o", str(output)]


def _run_compilers(commands: list[list[str]], output: Path) -> list[subprocess.CompletedProcess[str]]:
    """Runs compilers in parallel, with their messages in files beside ``output``. An interrupt ends them."""
    deadline = time.monotonic() + _COMPILE_SECONDS
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for number, command in enumerate(commands):
            log = output.with_suffix(f".{number}.said")
            with log.open("wb") as file:
                running.append((subprocess.Popen(command, stdout=file, stderr=file), log))  # noqa: S603 - our own, no shell
        for process, _ in running:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise TorchLibraryError(
            f"{error.cmd[0]} did not finish within {_COMPILE_SECONDS:.0f} s: {error.cmd}"
        ) from error
    except OSError as error:
        raise TorchLibraryError(
            f"the compiler {commands[0][0]} could not be run ({error.strerror}); set CXX to one that can"
        ) from error
    finally:
        for process, _ in running:
            process.kill()
            process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, "", log.read_text(errors="replace"))
        for process, log in running
    ]


class _Failure(NamedTuple):
    errors: str
    """All messages of the compiler."""
    command_and_errors: str
    """Text for users."""


def _make(target: BuildTarget, units: list[list[Path]], output: Path, *, lighter: bool) -> _Failure | None:
    """Compiles units of sources in parallel, and links them; returns the errors."""
    objects = [output.with_suffix(f".{number}.o") for number in range(len(units))]
    commands = [_compiling(target, unit, path, lighter=lighter) for unit, path in zip(units, objects, strict=True)]
    failed = [done for done in _run_compilers(commands, output) if done.returncode != 0]
    if not failed:
        failed = [done for done in _run_compilers([_linking(target, objects, output)], output) if done.returncode != 0]
    if not failed:
        return None
    return _Failure(
        "".join(done.stderr for done in failed),
        f"building the library that records operators of torch {target.version} failed"
        + "\n".join(map(_command_and_errors, failed)),
    )


def _command_and_errors(failed: subprocess.CompletedProcess[str]) -> str:
    command = " ".join(failed.args)
    return f" (exit status {failed.returncode}); the command was\n  {command}\nand it said\n{failed.stderr[-4000:]}"


def _compile_without(target: BuildTarget, left_out: tuple[str, ...], output: Path, *, lighter: bool) -> _Failure | None:
    """Compiles the sources without some of them; returns the errors."""
    # A torch without distributed has the headers, but not the symbols that they declare: the library could not be loaded.
    absent = () if target.has_distributed else (COLLECTIVES,)
    sources = [path for path in source_files() if path.suffix == ".cc" and _name(path) not in (*left_out, *absent)]
    second = [path for path in sources if _name(path) in _SECOND_UNIT and os.cpu_count() != 1]
    first = [path for path in sources if path not in second]
    return _make(target, [unit for unit in (first, second) if unit], output, lighter=lighter)


def compile_whole(target: BuildTarget, output: Path) -> None:
    """Compiles all sources; intermediate files stay beside the library.

    Raises:
        TorchLibraryError: it does not compile; the message has the command and the compiler's output.
    """
    left_out, why = _compile_possible(target, output)
    if left_out:
        raise TorchLibraryError(why)


def _compile_possible(target: BuildTarget, output: Path) -> tuple[tuple[str, ...], str]:
    """Compiles without optional sources that fail; returns these, and the errors.

    Each round leaves out all sources with errors: one at a time would take half a minute each.
    """
    left_out: tuple[str, ...] = ()
    why, lighter = "", True
    while failed := _compile_without(target, left_out, output, lighter=lighter):
        why = why if left_out else failed.command_and_errors
        blamed = [name for name in OPTIONAL if name not in left_out and name in failed.errors]
        if not blamed:
            raise TorchLibraryError(why)
        if lighter and COLLECTIVES in blamed:  # maybe only a header is missing
            lighter = False
            blamed.remove(COLLECTIVES)
        left_out += (*blamed,)
    return left_out, why


@contextlib.contextmanager
def _work_folder(place: Path) -> Iterator[Path]:
    """Creates a folder for intermediate files. Not a ``TemporaryDirectory``, which a child forked meanwhile would remove at its exit."""
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(dir=place, suffix=".building")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def _compile(torch: Any, target: Path) -> tuple[str, ...]:
    """Builds the library; returns the optional sources that are not in it."""
    try:
        with _work_folder(target.parent) as folder:
            output = folder / target.name
            output.touch()  # so that a compiler that writes nothing leaves an empty library, which cannot be loaded
            left_out, why = _compile_possible(BuildTarget.of(torch), output)
            output.chmod(0o755)
            for source in OPTIONAL:
                _why_file(target, source).unlink(missing_ok=True)
            for source in left_out:
                _why_file(target, source).write_text(why)
            _digest_file(target).write_text(_digest(output))
            output.replace(target)
    except OSError as error:
        raise TorchLibraryError(f"{target} could not be written: {error.strerror}") from error
    return left_out


def _why_file(library: Path, source: str) -> Path:
    return library.with_suffix(f".no_{Path(source).stem}")


def why_left_out(library: Path, source: str) -> str:
    """Returns the message why an optional source is not in a library."""
    why = _why_file(library, source)
    errors = why.read_text() if why.exists() else "what the compiler said was not kept"
    return (
        f"{OPTIONAL[source]}: {source} did not compile against the torch that is installed, and the library was built "
        f"without it; to try again, remove {library}. It was: {errors}"
    )


def _digest(path: Path) -> str:
    import hashlib

    with open(open_private(path), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def is_whole(path: Path) -> bool:
    """Whether the library exists and is unchanged since its build. Loading a truncated one would kill the process (SIGBUS).

    Raises:
        TorchLibraryError: another user could have written it.
    """
    try:
        digest = _digest(path)
        return _digest_file(path).read_text().strip() == digest
    except OSError:
        return False


def ensure(torch: Any, *, announce: bool = True) -> Path:
    """Returns the library for this torch; builds it if it is missing or damaged. Several processes may call it at once.

    Raises:
        TorchLibraryError: it cannot be built or may not be used; the message names the fix.
    """
    path = folder() / library_name(torch)
    if not is_whole(path):
        _make_folder(path.parent)
        with _build_lock(path):
            if not is_whole(path):
                _build(torch, path, announce=announce)
                _remove_unused(path.parent)
    _note_use(path)
    return path


def _note_use(library: Path) -> None:
    with contextlib.suppress(OSError):  # a shipped folder may be read-only
        if time.time() - library.stat().st_mtime > _DAY:
            os.utime(library)


def _remove_unused(place: Path) -> None:
    """Removes libraries that no process has used for three months: those of other releases, and of earlier versions.

    A process that has loaded one can still use it.
    """
    import glob

    for library in place.glob("torch_ops-*.so"):
        with contextlib.suppress(OSError):  # another process may do the same
            if time.time() - library.stat().st_mtime > _KEPT_SECONDS:
                for path in place.glob(f"{glob.escape(library.stem)}.*"):
                    path.unlink(missing_ok=True)


def _build(torch: Any, path: Path, *, announce: bool) -> None:
    def say(text: str) -> None:
        if announce:
            sys.stderr.write(f"otel-torchprof: {text}\n")
            sys.stderr.flush()

    compiler()  # raises before anything is done
    why = "the kept one is damaged: building again" if path.exists() else "building, once"
    say(f"library that records operators of torch {torch.__version__}: {why} (some seconds) ...")
    begin = time.monotonic()
    left_out = _compile(torch, path)
    say(f"built in {time.monotonic() - begin:.1f} s, kept as {path}")
    for source in left_out:
        say(f"{OPTIONAL[source]}: {source} did not compile against this torch (see {_why_file(path, source)})")
