#include "lock_holder.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace otp_python {

namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint32_t kMostLookedAt = 64;
constexpr size_t kMostKnown = 1024;

// What the system says that a thread is in: "running", or the number of a system call and its arguments.
bool read_syscall(uint32_t os_tid, char (&text)[64]) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/task/%u/syscall", os_tid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  text[size < 0 ? 0 : size] = '\0';
  return size > 0;
}

}  // namespace

uint64_t ran_ns(uint32_t os_tid) {
  constexpr clockid_t kOfThread = 6;  // CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED
  timespec ran;
  if (clock_gettime(static_cast<clockid_t>(~os_tid << 3) | kOfThread, &ran) != 0) return 0;
  return static_cast<uint64_t>(ran.tv_sec) * kSecond + static_cast<uint64_t>(ran.tv_nsec);
}

LockHolder::LockHolder() {
#ifdef __GLIBC__
  // The lock is in it: directly up to Python 3.11, later in its first interpreter.
  void* runtime = dlsym(RTLD_DEFAULT, "_PyRuntime");
  Dl_info info;
  ElfW(Sym)* symbol = nullptr;
  if (runtime == nullptr || dladdr1(runtime, &info, reinterpret_cast<void**>(&symbol), RTLD_DL_SYMENT) == 0) return;
  if (symbol == nullptr || info.dli_saddr != runtime) return;
  d_low = reinterpret_cast<uintptr_t>(runtime);
  d_high = d_low + symbol->st_size;
#endif
}

bool LockHolder::is_waiting(uint32_t os_tid) const {
  char text[64];
  long number = 0;
  uint64_t address = 0;
  if (d_high == 0 || !read_syscall(os_tid, text)) return false;
  if (std::sscanf(text, "%ld %" SCNx64, &number, &address) != 2) return false;
  return number == SYS_futex && address >= d_low && address < d_high;
}

bool LockHolder::find(uint32_t os_tid, PythonThreadCopy* out) {
  if (d_ran.size() > kMostKnown) d_ran.clear();
  PythonThreadCopy thread{};
  uint32_t found = 0;
  bool is_there = copy_first_thread(&thread);
  for (uint32_t i = 0; is_there && i < kMostLookedAt; ++i, is_there = copy_next_thread(&thread)) {
    if (thread.os_tid == os_tid || thread.os_tid == 0) continue;
    uint64_t ran = ran_ns(thread.os_tid), before = ran;
    std::swap(d_ran[thread.os_tid], before);
    char text[64];
    if (ran == before || !read_syscall(thread.os_tid, text) || std::strncmp(text, "running", 7) != 0) continue;
    *out = thread;
    ++found;
  }
  return found == 1 && !is_there;
}

}  // namespace otp_python
