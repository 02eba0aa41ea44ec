// A source and a carrier of contexts whose threads are in whatever context a test says.
#pragma once

#include <atomic>
#include <functional>

#include "core_support.h"

struct FakeContext {
  uint64_t version = 0;  // 0: the source cannot tell of this thread
  uint32_t context = 0;
  int resolved = 0;
  std::function<void()> inside;  // run by the source while it is asked
};
inline thread_local FakeContext t_here;

struct FakeCarried {
  uint32_t context = 0, origin = 0;
};
inline thread_local FakeCarried t_carried;
inline thread_local int t_carried_asked = 0;

inline uint64_t fake_version() { return t_here.version; }
inline uint32_t fake_resolve() {
  ++t_here.resolved;
  uint32_t context = t_here.context;
  if (t_here.inside) t_here.inside();
  return context;
}
inline void fake_carry(uint32_t context, uint32_t thread) { t_carried = {context, context == 0 ? 0 : thread}; }
inline uint32_t fake_carried(uint32_t* thread) {
  ++t_carried_asked;
  *thread = t_carried.origin;
  return t_carried.context;
}
inline const otp_context_source kFakeSource{fake_version, fake_resolve};
inline const otp_context_carrier kFakeCarrier{fake_carry, fake_carried};

// The calling thread is in another context from now on.
inline void enter(uint32_t context) {
  static std::atomic<uint64_t> last_version{0};
  t_here.context = context;
  t_here.version = last_version.fetch_add(1) + 1;
}

// For the time of a test; the thread starts outside of any context.
class Contexts {
 public:
  explicit Contexts(const otp_context_carrier* carrier = nullptr) {
    t_here = FakeContext();
    t_carried = FakeCarried();
    api().set_context_source(&kFakeSource);
    api().set_context_carrier(carrier);
    enter(0);
  }
  ~Contexts() {
    api().set_context_source(nullptr);
    api().set_context_carrier(nullptr);
  }
  Contexts(const Contexts&) = delete;
  Contexts& operator=(const Contexts&) = delete;
};

inline otp_session_options following(uint64_t budget = kPlenty, uint32_t policy = OTP_FULL_DROP_NEWEST) {
  otp_session_options requested = options(budget, policy);
  requested.contexts = 1;
  return requested;
}

inline otp_begin_args label(const char* name) {
  otp_begin_args args = event(name, name);
  args.kind = OTP_EVENT_LABEL;
  args.nests = 1;
  return args;
}
inline uint32_t begin_label(const char* name) {
  otp_begin_args args = label(name);
  return api().begin(&args);
}

inline uint32_t context_of(const Batch& batch, const char* name) { return batch->context[batch.row(name)]; }
