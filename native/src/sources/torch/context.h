// Takes contexts along where torch takes its thread-local state: into the threads of autograd and of jit.fork.
//
// Part of that state is a table of Python objects by name, meant for libraries that want to have theirs there. Ours
// lies in it under a name that nobody else looks up. It holds no Python object, so that copying it and letting go of
// it, which torch does wherever a thread begins and ends a piece of work, asks for no lock of Python's.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "otel_torchprof/recorder.h"

namespace otp {

// How often this process was forked, from the first on that used the library.
inline std::atomic<uint32_t> g_forks{0};

// Torch passes such an object on, and frees it, by locks and atomics of its own, which ThreadSanitizer does not see. It
// never changes after it was made, and is freed only when no thread has it any more.
#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
inline void made(void* object) { __tsan_release(object); }
inline void found(const void* object) { __tsan_acquire(const_cast<void*>(object)); }
inline void left(const void* object) { __tsan_release(const_cast<void*>(object)); }
#else
inline void made(void*) {}
inline void found(const void*) {}
inline void left(const void*) {}
#endif

struct CarriedContext final : c10::SafePyObject {
  CarriedContext(uint32_t of_context, uint32_t of_thread)
      : SafePyObject(nullptr, nullptr),
        context(of_context),
        thread(of_thread),
        forks(g_forks.load(std::memory_order_relaxed)) {}

  ~CarriedContext() { found(this); }

  uint32_t context, thread;
  uint32_t forks;  // the parent's threads are not those of a forked child
};

// Short, so that a copy of it needs no memory of its own. Never destroyed: a thread may run an operator while the
// process ends.
inline const std::string& carried_name() {
  static const auto* name = new std::string("otel_torchprof");
  return *name;
}

inline uint32_t carried_context(uint32_t* thread) try {
  using Objects = at::impl::ThreadLocalPythonObjects;
  if (!Objects::contains(carried_name())) return 0;
  const auto* carried = static_cast<const CarriedContext*>(Objects::get(carried_name()).get());
  if (carried == nullptr) return 0;
  found(carried);
  bool is_ours = carried->forks == g_forks.load(std::memory_order_relaxed);
  uint32_t context = is_ours ? carried->context : 0;
  if (is_ours) *thread = carried->thread;
  left(carried);
  return context;
} catch (...) {  // torch throws where memory is short
  return 0;
}

// Nothing is carried where memory is short: then the work of other threads has no span around it.
inline void carry_context(uint32_t context, uint32_t thread) try {
  using Objects = at::impl::ThreadLocalPythonObjects;
  if (context != 0) {
    auto carried = std::make_shared<CarriedContext>(context, thread);
    made(carried.get());
    Objects::set(carried_name(), std::move(carried));
  } else if (Objects::contains(carried_name())) {
    Objects::set(carried_name(), nullptr);  // not every torch can take a name out
  }
} catch (...) {
}

inline const otp_context_carrier kContextCarrier = {carry_context, carried_context};

}  // namespace otp
