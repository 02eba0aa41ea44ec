// Which thread runs Python while another one waits for the interpreter's lock (GIL): found from outside, by what the
// system says of the threads, without that lock.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_LOCK_HOLDER_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_LOCK_HOLDER_H_

#include <cstdint>
#include <unordered_map>

#include "thread_list.h"

namespace otp_python {

// How long a thread has had a processor, in ns; 0: not known.
uint64_t ran_ns(uint32_t os_tid);

// Of one thread. Never true where the system does not show system calls of threads (/proc/self/task/N/syscall).
class LockHolder {
 public:
  LockHolder();
  // Whether a thread waits for a lock of the interpreter's own state. Some 10 us.
  bool is_waiting(uint32_t os_tid) const;
  // The only other thread of Python that runs; false where there is none, or several. Some 2 us a thread.
  bool find(uint32_t os_tid, PythonThreadCopy* out);

 private:
  uintptr_t d_low = 0, d_high = 0;               // of the interpreter's state
  std::unordered_map<uint32_t, uint64_t> d_ran;  // of threads, when it was asked last
};

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_LOCK_HOLDER_H_
