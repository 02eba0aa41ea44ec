// In which context a thread is: the span of the service that its work belongs to.
#include "core/recording.h"

namespace otp {

namespace {

// The sessions that have started to follow contexts since the thread last found out its own.
uint32_t new_followers(uint32_t known_epoch) {
  uint32_t found = 0;
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  for (otp_session* session : all.sessions) {
    bool follows = session != nullptr && session->options.contexts != 0;
    if (follows && static_cast<int32_t>(session->follow_epoch - known_epoch) > 0) found |= session->mask();
  }
  return found;
}

// What torch's state brought to this thread. What the thread put there itself is the context that it was in once, and
// has left since: the source would report it otherwise.
uint32_t carried_context(const ThreadBuffer& thread) {
  const otp_context_carrier* carrier = g_context_carrier.load(std::memory_order_acquire);
  if (carrier == nullptr) return 0;
  uint32_t origin = 0;
  uint32_t context = carrier->carried(&origin);
  if (context == 0 || origin != thread.id) return context;
  carrier->carry(0, thread.id);
  return 0;
}

// A thread that gets it carried sees the mark that it may: whatever brings it orders that.
void carry(const ThreadBuffer& thread, uint32_t context) {
  const otp_context_carrier* carrier = g_context_carrier.load(std::memory_order_acquire);
  if (carrier == nullptr) return;
  otp_expect_contexts();
  carrier->carry(context, thread.id);
}

// Asks the source. What runs inside of it belongs to no span of the service: nobody who follows contexts gets it.
// False: it was a fork that returned, in the child, where this buffer is a dead copy.
bool resolve(ThreadBuffer& thread, const otp_context_source& source) {
  thread.context_unknown = ThreadBuffer::kResolving;
  uint32_t context = source.resolve();
  if (t_buffer != &thread) return false;
  thread.own_context = context;
  if (context != 0) carry(thread, context);
  return true;
}

void enter_context(ThreadBuffer& thread, uint32_t context) {
  if (context == thread.context) return;
  thread.context = context;
  uint32_t follows = g_shared.follows.load(std::memory_order_relaxed);
  thread.context_pending |= follows;
  thread.not_ready |= follows;
}

}  // namespace

bool refresh_context_slowpath(ThreadBuffer& thread, const otp_context_source* source, uint64_t version) {
  if (thread.context_unknown == ThreadBuffer::kResolving) return true;
  // Both before the source is asked: what changes meanwhile is asked for at the next event.
  uint32_t epoch = g_shared.follow_epoch.load(std::memory_order_acquire);
  bool known = version != 0 && version == thread.context_version && epoch == thread.context_epoch;
  if (version == 0) {
    thread.own_context = 0;
  } else if (!known && !resolve(thread, *source)) {
    return false;
  }
  thread.context_unknown = 0;
  thread.context_version = version;
  thread.context_epoch = epoch;
  enter_context(thread, thread.own_context != 0 ? thread.own_context : carried_context(thread));
  return true;
}

void note_followers_slowpath(ThreadBuffer& thread) {
  uint32_t epoch = g_shared.follow_epoch.load(std::memory_order_acquire);
  thread.context_unknown |= new_followers(thread.context_epoch);
  thread.context_epoch = epoch;
  thread.context_version = 0;
}

}  // namespace otp

extern "C" void otp_mute_thread(void) {
  otp::ThreadBuffer* thread = otp::this_thread();
  if (thread != nullptr) thread->context_unknown = otp::ThreadBuffer::kResolving;
}
