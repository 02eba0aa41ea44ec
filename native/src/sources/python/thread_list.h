// The interpreter's list of threads, copied from any thread, without Python's lock.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_THREAD_LIST_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_THREAD_LIST_H_

#include <cstdint>

namespace otp_python {

struct PythonThreadCopy {
  uintptr_t state;
  uintptr_t next;
  uint64_t ident;
  uint32_t os_tid;  // 0: not known
};

constexpr uint32_t kMostThreads = 4096;  // that are looked at, of a list that may be torn

// The newest thread, and the one that is older than it; false where there is none, or it has ended.
bool copy_first_thread(PythonThreadCopy* out);
bool copy_next_thread(PythonThreadCopy* thread);

// The thread with this number; false where there is none.
bool copy_thread_of(uint32_t os_tid, PythonThreadCopy* out);

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_THREAD_LIST_H_
