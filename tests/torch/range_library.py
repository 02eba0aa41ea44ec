"""Stand-ins for what ranges go to: an NVTX library, an ITT collector, and torch's own ways to both; all of them write down."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG = r"""
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char text[1 << 22];
static size_t size;

static void note(const char* what, const char* name) {
  pthread_mutex_lock(&lock);
  size += snprintf(text + size, sizeof(text) - size, "%ld\t%s\t%s\n", (long)syscall(SYS_gettid), what, name);
  if (size >= sizeof(text)) size = sizeof(text) - 1;
  pthread_mutex_unlock(&lock);
}
#ifdef __cplusplus
extern "C" {
#endif
const char* log_text(void) { return text; }
void log_clear(void) { size = 0; text[0] = 0; }
#ifdef __cplusplus
}
#endif
"""

NVTX = (
    _LOG
    + r"""
int nvtxRangePushA(const char* name) { note("push", name); return 0; }
int nvtxRangePop(void) { note("pop", ""); return 0; }
void nvtxMarkA(const char* name) { note("mark", name); }
"""
)

# The collector's side of ITT: it is handed a table of functions by name, and puts its own into it.
ITT = (
    _LOG
    + r"""
#include <stdlib.h>
typedef struct { const char* name; void** function; void* init; void* none; int group; } entry;
typedef struct {
  unsigned char magic[8];
  unsigned long major, minor, build;
  volatile long initialized, mutex_initialized, counter;
  pthread_mutex_t mutex;
  void *library, *error_handler;
  const char** path;
  entry* entries;
} table;
typedef struct { unsigned long long words[3]; } identity;

/* Begins as ITT's own, which made the handles that come from before this library was there. */
typedef struct { const char* name; void* rest[4]; } handle;
static handle* create(const char* name) {
  handle* made = calloc(1, sizeof(handle));
  made->name = strdup(name);
  return made;
}
static void begin(const void* domain, identity task, identity parent, handle* of) { note("push", of->name); }
static void end(const void* domain) { note("pop", ""); }

void __itt_api_init(table* given, int groups) {
  for (entry* e = given->entries; e->name != NULL; ++e) {
    if (strcmp(e->name, "__itt_string_handle_create") == 0) *e->function = (void*)create;
    if (strcmp(e->name, "__itt_task_begin") == 0) *e->function = (void*)begin;
    if (strcmp(e->name, "__itt_task_end") == 0) *e->function = (void*)end;
  }
}
"""
)

# What a torch with CUDA registers for itself, so that its own emit_nvtx and emit_itt can be watched without any.
TORCH = (
    _LOG
    + r"""
#include <torch/csrc/profiler/stubs/base.h>
using namespace torch::profiler::impl;
struct Way final : ProfilerStubs {
  void record(c10::DeviceIndex*, ProfilerVoidEventStub*, int64_t*) const override {}
  float elapsed(const ProfilerVoidEventStub*, const ProfilerVoidEventStub*) const override { return 0; }
  void mark(const char* name) const override { note("mark", name); }
  void rangePush(const char* name) const override { note("push", name); }
  void rangePop() const override { note("pop", ""); }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)>) const override {}
  void synchronize() const override {}
};
extern "C" void log_register() {
  registerCUDAMethods(new Way);
  registerITTMethods(new Way);
}
"""
)


def compiled(source: str, folder: Path, name: str) -> Path:
    """The library made of a C source, or of a C++ source that includes torch."""
    cpp = "torch/csrc" in source
    file, library = folder / f"{name}.{'cc' if cpp else 'c'}", folder / f"{name}.so"
    file.write_text(source)
    command = [shutil.which("g++" if cpp else "gcc") or "cc", "-O1", "-fPIC", "-shared", "-pthread", str(file)]
    if cpp:
        import torch

        root = Path(torch.__file__).parent
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        command += ["-std=c++20", "-DNDEBUG", abi, *includes, f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run([*command, "-o", str(library)], check=True, capture_output=True, text=True)
    return library


class Log:
    """What a stand-in wrote down."""

    def __init__(self, library: Path) -> None:
        self.native: Any = ctypes.CDLL(str(library))
        self.native.log_text.restype = ctypes.c_char_p

    def clear(self) -> None:
        """Forgets it."""
        self.native.log_clear()

    def lines(self) -> list[tuple[int, str, str]]:
        """Every call: the thread, ``push``, ``pop`` or ``mark``, and the text."""
        rows = self.native.log_text().decode("utf-8", "surrogateescape").splitlines()
        return [(int(thread), what, text) for thread, what, text in (row.split("\t") for row in rows)]

    def wait_for(self, condition: Callable[[Counter[str]], bool]) -> None:
        """Until the numbers of pushes and pops are as wanted: a future is there before the pool's thread is done with it."""
        deadline = time.monotonic() + 30
        while not condition(Counter(what for _, what, _ in self.lines())):
            assert time.monotonic() < deadline, self.lines()

    def trees(self) -> dict[int, list[str]]:
        """By thread: the ranges in the order of their begin, indented by how deep they are; ``!`` for an instant.

        Fails where a thread ends a range that it has not begun.
        """
        found: dict[int, list[str]] = {}
        depths: dict[int, int] = {}
        for thread, what, text in self.lines():
            depth = depths.get(thread, 0)
            if what == "pop":
                assert depth > 0, f"thread {thread} ends a range that it has not begun"
            else:
                found.setdefault(thread, []).append(f"{' ' * depth}{'!' * (what == 'mark')}{text}")
            depths[thread] = depth + {"push": 1, "pop": -1, "mark": 0}[what]
        self.open = {thread: depth for thread, depth in depths.items() if depth}
        return found

    def tree(self) -> list[str]:
        """The ranges of the only thread that has some; all of them have ended."""
        (lines,) = self.trees().values()
        assert self.open == {}
        return lines
