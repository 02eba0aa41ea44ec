"""``otel-torchprof run`` changes nothing of a script: each ends, prints and behaves as with ``python``."""

from __future__ import annotations

import os
import py_compile
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import forked_programs
import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMAND = ("-m", "otel_torchprof", "run", "-o", "trace.json")
OURS = re.compile(
    rb"otel-torchprof: .*\n"
    rb"|.*DeprecationWarning: This process \(pid=\d+\) is multi-threaded, use of fork.*\n.*fork.*\n"  # ours, from 3.12 on
)
CHANGING = re.compile(rb"0x[0-9a-f]+|object refcount : \d+|on line \d+|see https://\S+")

SCRIPTS = {
    # How it ends.
    "falls off the end": "print('x')",
    "exit 3": "import sys; sys.exit(3)",
    "exit None": "import sys; sys.exit(None)",
    "exit 256": "import sys; sys.exit(256)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit text": "import sys; sys.exit('why')",
    "exit a tuple": "raise SystemExit(1, 2)",
    "_exit": "import os, sys; print('x'); sys.stdout.flush(); os._exit(7)",
    "abort by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGTERM handled": "import os, signal, sys\nsignal.signal(15, lambda *a: sys.exit(9))\nos.kill(os.getpid(), 15)\nsignal.pause()",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "KeyboardInterrupt": "raise KeyboardInterrupt('of mine')",
    "an exception": "def f():\n    raise LookupError('x')\nf()",
    "an exception group": "import sys\nraise (ExceptionGroup('g', [ValueError('a')]) if sys.version_info >= (3, 11) else ValueError('a'))",
    "an exception that cannot be printed": "class Bad(Exception):\n    def __str__(self): raise ValueError\nraise Bad",
    "a BaseException": "class Mine(BaseException): pass\nraise Mine('x')",
    "an exception of ours": "from otel_torchprof import TorchProfError\nraise TorchProfError('of the script')",
    "OSError": "open('nowhere')",
    "a syntax error": "print('x'",
    "a syntax error inside": "compile('1 +', 'text', 'exec')",
    "bytes that are no UTF-8": b"# \xff\nprint(1)",
    "bytes that are no UTF-8 in a line": "print('é ".encode() + b"\xff rest')\nx = 2\n",
    "an execution": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(6)'])",
    "an own excepthook": "import sys\nsys.excepthook = lambda kind, error, tb: print('hook', kind, error, tb.tb_frame.f_code.co_name, tb.tb_next)\n1 / 0",
    "an excepthook that raises": "import sys\ndef hook(*a): raise ValueError('of the hook')\nsys.excepthook = hook\n1 / 0",
    "no excepthook": "import sys\ndel sys.excepthook\n1 / 0",
    "an excepthook of None": "import sys\nsys.excepthook = None\n1 / 0",
    "an excepthook that exits": "import sys\nsys.excepthook = lambda *a: sys.exit(8)\n1 / 0",
    "a traceback limit": "import sys\nsys.tracebacklimit = 0\n1 / 0",
    # Exit handlers, threads, children.
    "exit handlers": "import atexit\natexit.register(print, 'at exit')\nprint('x')",
    "an exit handler that raises": "import atexit\n@atexit.register\ndef f(): raise ValueError('late')",
    "an exit handler that exits": "import atexit, sys\natexit.register(sys.exit, 5)",
    "an exit handler that _exits": "import atexit, os\natexit.register(os._exit, 5)",
    "SystemExit in a thread": "import sys, threading\nthreading.Thread(target=sys.exit, args=(3,)).start()",
    "an exception in a thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join()",
    "a thread that works on": "import threading\ndef f():\n    threading.main_thread().join(); print('after')\nthreading.Thread(target=f).start()\nraise SystemExit(3)",
    "a daemon thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    "a fork": "import os, sys\npid = os.fork()\nif not pid:\n    print('child'); sys.exit(4)\nprint(os.waitpid(pid, 0)[1] >> 8)",
    "a fork that falls off the end": "import os\npid = os.fork()\nif pid:\n    print(os.waitpid(pid, 0)[1])",
    "a fork whose parent ends first": "import os\nr, w = os.pipe()\nif os.fork():\n    os._exit(os.read(r, 1)[0])\nos.write(w, b'5')",
    "daemons": "import os, sys\nfor n in range(2):\n    pid = os.fork()\n    if pid: os._exit(os.waitpid(pid, 0)[1] >> 8)\n    os.setsid() if not n else None\nfor n in range(3): os.close(n)\nprint(os.open('/dev/null', os.O_RDWR), os.dup(0), os.dup(0))\nsys.exit(0 if os.fstat(2) else 1)",
    # What it does to the process.
    "no modules": "import sys; sys.modules.clear(); print('x')",
    "no modules, exit 3": "import sys; sys.modules.clear(); sys.exit(3)",
    "no modules, an exception": "import sys; sys.modules.clear(); 1 / 0",
    "None for modules": "import sys, threading\nfor name in list(sys.modules):\n    if name not in ('sys', 'builtins', 'threading'): sys.modules[name] = None\nprint('x')",
    "modules are gone": "import sys; del sys.modules; print('x')",
    "another dict of modules": "import sys; sys.modules = {}; print('x')",
    "no __main__": "import sys; del sys.modules['__main__']; print('x')",
    "no package of ours": "import sys\nfor name in list(sys.modules):\n    if name.startswith(('otel_torchprof', 'opentelemetry')): del sys.modules[name]\nprint('x')",
    "no path": "import sys; sys.path.clear(); sys.meta_path.clear(); sys.path_hooks.clear(); print('x')",
    "argv": "import sys; print(sys.argv); del sys.argv; print('x')",
    "0 closed": "import os; os.close(0); print('x')",
    "1 closed": "import os; print('x'); os.close(1)",
    "1 closed, exit 3": "import os, sys; print('x'); os.close(1); sys.exit(3)",
    "2 closed": "import os; os.close(2); print('x')",
    "2 closed, an exception": "import os; os.close(2); 1 / 0",
    "0 to 2 closed": "import os\nfor n in range(3): os.close(n)",
    "0 to 2 closed, text waiting": "import os, sys\nprint('x'); sys.stderr.write('y')\nfor n in range(3): os.close(n)",
    "0 to 2 closed, exit 3": "import os, sys\nprint('x')\nfor n in range(3): os.close(n)\nsys.exit(3)",
    "all closed": "import os; os.closerange(0, 4096)",
    "all closed, text waiting": "import os; print('x'); os.closerange(0, 4096)",
    "0 to 2 opened again": "import os\nfor n in range(3): os.close(n)\nfor n in range(3): assert os.open('own.txt', os.O_RDWR | os.O_CREAT) == n\nprint('mine', flush=True)\nos.write(2, b'too')",
    "stdout closed": "import sys; print('x'); sys.stdout.close()",
    "stderr closed": "import sys; print('x'); sys.stderr.close()",
    "stderr closed, an exception": "import sys; sys.stderr.close(); 1 / 0",
    "no stdout": "import sys; sys.stdout = None; print('x')",
    "no stderr": "import sys; sys.stderr = None; print('x'); sys.exit('y')",
    "streams are gone": "import sys; print('x'); del sys.stdout, sys.stderr",
    "another stderr": "import io, sys; sys.stderr = io.StringIO(); sys.stderr.write('y'); print('x')",
    "a stderr that raises": "import sys\nclass Bad:\n    def write(self, t): raise ValueError\n    def flush(self): raise KeyboardInterrupt\nsys.stderr = Bad()",
    "text without an end": "import sys; sys.stdout.write('x'); sys.stderr.write('y')",
    "a working folder that is gone": "import os, tempfile\nfolder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder); print('x')",
    "another working folder": "import os; os.chdir('/'); print(os.getcwd())",
    "a working folder that cannot be read": "import os; os.mkdir('d'); os.chdir('d'); os.chmod('.', 0); print('x')",
    "no room in files": "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); print('x')",
    "no descriptors": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); print('x')",
    "builtins are gone": "import builtins\nprint('x')\nfor name in ('open', 'print', 'len', 'sorted', 'isinstance', 'any', 'map'): delattr(builtins, name)",
    "time stands still": "import time; time.time = time.monotonic = lambda: 0.0; print('x')",
    "json is another": "import json; json.dumps = json.loads = None; print('x')",
    "open is another": "import builtins, os\nbuiltins.open = os.open = None; print('x')",
    "no threads": "import threading\ndef start(self): raise RuntimeError('none')\nthreading.Thread.start = start; print('x')",
    "warnings": "import warnings; warnings.warn('mind'); print('x')",
    "warnings as errors": "import warnings; warnings.simplefilter('error'); print('x')",
    "modules that are there": "import sys; print('torch' in sys.modules, 'numpy.random' in sys.modules and 'yes' and None)",
    "stdin": "print(input())",
    "recursion limit": "import sys; sys.setrecursionlimit(100); print('x')",
    "its own file afterwards": "import atexit\natexit.register(lambda: print(__file__))",
    "its own file after an exit": "import atexit, sys\natexit.register(lambda: print(__file__)); sys.exit()",
    "objects of children": "import multiprocessing as mp, sys\nclass Item: pass\ndef work(n): return Item()\n"
    "if __name__ == '__main__':\n    for kind in ('spawn', 'forkserver', 'fork'):\n        with mp.get_context(kind).Pool(1) as pool:\n"
    "            print(type(pool.map_async(work, [1]).get(timeout=30)[0]) is Item)",
    "a finalizer at the end": "class Loud:\n    def __del__(self): print('deleted')\nloud = Loud()",
}


def started(
    *words: str, folder: Path, popen: type[subprocess.Popen[bytes]] = subprocess.Popen
) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return popen([sys.executable, *words], cwd=folder, env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=pipe)


SOME = (
    *(
        "exit 3",
        "_exit",
        "abort by a signal",
        "SIGTERM handled",
        "SIGINT",
        "an exception",
        "a syntax error",
    ),
    *("an own excepthook", "exit handlers", "a daemon thread"),
    *(
        "a fork that falls off the end",
        "daemons",
        "no modules, an exception",
        "no path",
    ),
    *("1 closed, exit 3", "no stderr", "another working folder"),
    *("its own file afterwards", "objects of children"),
    *("no descriptors", "no threads", "warnings as errors", "stdin", "a finalizer at the end"),
)
"""At least one of each kind."""
FORKED = {
    *("exit 3", "SIGTERM handled", "SIGINT", "an exception", "a syntax error", "an own excepthook", "exit handlers"),
    *(
        "1 closed, exit 3",
        "no stderr",
        "another working folder",
        "its own file afterwards",
        "warnings as errors",
        "stdin",
    ),
}
"""What ends by what the command does: it is forked. Of the others the end is the interpreter's, and what it has imported matters."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.exhaustive) for name in SCRIPTS]
)
def test_alike(tmp_path, name):
    """Exit status, stdout, stderr and the file that some write are the same, but for lines that begin with our name."""
    source = SCRIPTS[name]
    folders = tmp_path / "alone" / "same", tmp_path / "recorded" / "same"
    processes = []
    recorded = forked_programs.Popen if name in FORKED else subprocess.Popen
    for folder, words, popen in zip(folders, ((), COMMAND), (subprocess.Popen, recorded), strict=True):
        folder.mkdir(parents=True)
        (folder / "script.py").write_bytes(source if isinstance(source, bytes) else source.encode())
        processes.append(started(*words, "script.py", "--option", folder=folder, popen=popen))
    found = []
    for folder, process in zip(folders, processes, strict=True):
        texts = (text.replace(bytes(folder), b"FOLDER") for text in process.communicate(b"line\n", 60))
        out, err = (OURS.sub(b"", CHANGING.sub(b"", text)) for text in texts)
        own = folder / "own.txt"
        found.append((process.returncode, out, err, own.read_bytes() if own.exists() else b""))
    assert found[1] == found[0]


def test_a_reader_that_has_seen_enough(tmp_path):
    """A script whose stdout is a pipe that is closed early ends as with Python."""
    (tmp_path / "script.py").write_text("for _ in range(100_000): print('x' * 100)")
    ends = []
    for words in ((), COMMAND):
        process = started(*words, "script.py", folder=tmp_path)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        # What was in Python's buffer when the pipe broke decides whether its last flush fails too: status 120, and a line more.
        said, _, _ = OURS.sub(b"", process.stderr.read()).partition(b"Exception ignored")
        ends.append((said, process.wait(60) in {1, 120}))
        process.stderr.close()
        process.stdin.close()
    assert ends[1] == ends[0]
    assert b"BrokenPipeError" in ends[0][0]
    assert ends[0][1]


SELF = """
import sys
main = sys.modules["__main__"]
if sys.argv[1:] == ["fail"]:
    raise LookupError
print(sorted((name, repr(value)) for name, value in globals().items() if name.startswith("__")))
print(sys.argv, sys.orig_argv, sys.path, sys.flags, globals() is main.__dict__)
import inspect, multiprocessing.spawn, pickle
class Thing: pass
try:
    print(inspect.getsource(Thing), inspect.getsourcefile(Thing), inspect.getmodule(Thing))
except OSError as error:
    print(error)
print(pickle.dumps(Thing), sys.modules["__mp_main__"] is main)
told = multiprocessing.spawn.get_preparation_data("child")
print({name: value for name, value in told.items() if name != "authkey"})
"""

FORMS = {
    "a path": "./folder/../folder/module.py",
    "a link": "link.py",
    "a module": "-m folder.module",
    "a package": "-m folder",
    "a folder": "folder/.",
    "an archive": "archive.pyz",
    "bytecode": "module.pyc",
    "code": "-c CODE",
    "standard input": "-",
    "an unknown module": "-m folder.nowhere",
    "an empty folder": "empty",
    "isolated": "-I folder/module.py",
    "an isolated folder": "-I folder",
}


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=() if number % 2 else pytest.mark.exhaustive) for number, form in enumerate(FORMS)],
)
def test_forms_alike(tmp_path, form):
    """However a program is named, what it sees of itself, its traceback and its exit status are as with Python."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").mkdir()
    for name in ("folder/module.py", "folder/__main__.py"):
        (tmp_path / name).write_text(SELF)
    (tmp_path / "link.py").symlink_to("folder/module.py")
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        archive.write(tmp_path / "folder" / "__main__.py", "__main__.py")
    py_compile.compile(str(tmp_path / "folder" / "module.py"), str(tmp_path / "module.pyc"))
    words = [SELF if word == "CODE" else word for word in FORMS[form].split()]
    flags = [words.pop(0)] if words[0] == "-I" else []
    command = [f"{flags[0]}m", *COMMAND[1:]] if flags else COMMAND
    processes = [
        started(*before, *words, argument, folder=tmp_path)
        for argument in ("--fine", "fail")
        for before in (flags, command)
    ]
    ends = []
    for process in processes:
        out, err = process.communicate(SELF.encode() if words == ["-"] else b"", 60)
        err = OURS.sub(b"", CHANGING.sub(b"", err)) if b"Traceback" in err else b""
        ends.append((process.returncode, CHANGING.sub(b"", out), err))
    assert ends[1] == ends[0]
    assert ends[3] == ends[2]


def test_modules_of_its_folder(tmp_path):
    """A script finds the modules beside it under names that this command has imported from elsewhere before."""
    folder = tmp_path / "folder"
    (folder / "statistics").mkdir(parents=True)
    (folder / "logging").mkdir()  # a folder that is no package
    for name in ("queue.py", "uuid.py", "statistics/__init__.py", "statistics/more.py", "numpy.py", "logging/x.txt"):
        (folder / name).write_text("here = True")
    (folder / "script.py").write_text(
        "import logging, queue, statistics.more, uuid, numpy, threading\n"
        "print(queue.__file__, statistics.more.here, uuid.here, numpy.here, logging.__file__, threading.__file__)\n"
        "import sys\n"
        "if recorder := sys.modules.get('otel_torchprof'):\n"
        "    with recorder.record_function('work'): pass"
    )
    processes = [started(*words, "folder/script.py", folder=tmp_path) for words in ((), COMMAND)]
    expected, found = ((process.communicate(b"", 60), process.returncode) for process in processes)
    assert found[0][0] == expected[0][0]
    assert (expected[1], found[1]) == (0, 0)
    assert b"Error" not in found[0][1]
    assert b'"work"' in (tmp_path / "trace.json").read_bytes()
