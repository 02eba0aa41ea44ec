// Times of devices: a timing event on the current stream at the begin of an operator, label or module, another at its
// end, read back when the device has come to them.
//
// A thread that records makes and records events, and asks nothing of the device: that is left to a thread of this
// library, which looks every two milliseconds for what is done. Only where so much has piled up that this thread seems
// to get no time, a recording thread looks once too; it never waits. Asking from the recording thread every time was
// the tempting way: two questions of about a microsecond more for every operator.
#include "devices.h"

#include <cstdlib>
#include <cstring>

#include "device_marks.h"

namespace otp::devices {
namespace {

// After an error that stays, the device's library would complain of every event that it is asked to free.
bool answers(State& s) {
  if (!s.wishes.failed.load(std::memory_order_acquire)) return true;
  try {
    for (const auto& events : s.spares)
      if (!events.empty()) s.guard->queryEvent(events.back());
    return true;
  } catch (...) {
    s.spares.clear();
    s.clocks.clear();
    return false;
  }
}

// Under `control`, with nobody recording: the events go back to the device's library. What a thread has that stands in
// that library now goes the next time.
void close_type(State& s) {
  s.waiting.take_all([&](const Pair& pair) { give_back(s, pair); });
  std::lock_guard<std::mutex> hold(s.threads_mutex);
  give_back_ended(s, s.orphans);
  for (ThreadMarks* marks : s.threads) {
    std::unique_lock<std::timed_mutex> own(marks->mutex, kPatience);
    if (!own.owns_lock()) continue;
    give_back_ended(s, marks->ended);  // what was open when all was gathered may have ended since
    give_back_all(s, *marks);
  }
  std::lock_guard<std::mutex> spares(s.spares_mutex);
  if (g_exiting.load(std::memory_order_relaxed) || !answers(s)) return;
  uint64_t destroyed = 0;
  for (size_t index = 0; index < s.spares.size(); ++index) {
    for (void* event : s.spares[index]) s.guard->destroyEvent(event, static_cast<c10::DeviceIndex>(index));
    destroyed += s.spares[index].size();
  }
  s.spares.clear();
  for (auto& clock : s.clocks) {
    if (clock == nullptr) continue;
    destroyed += clock->events();
    clock->destroy_events();
  }
  s.destroyed.fetch_add(destroyed);
}

// The first session chooses the type of device. Under `control`.
void open_type(State& s, c10::DeviceType type) {
  if (!s.sessions.empty()) {
    TORCH_CHECK(!s.wishes.failed.load(std::memory_order_acquire), s.failure);
    TORCH_CHECK(s.type == type, "another profile times ", s.type, " devices, and only one type can be timed at a time");
    return;
  }
  if (s.guard != nullptr) close_type(s);  // who stopped last may not have come to it
  TORCH_CHECK(c10::impl::hasDeviceGuardImpl(type), "torch has no ", type, " devices here");
  s.guard = c10::impl::getDeviceGuardImpl(type);
  TORCH_CHECK(s.guard->deviceCount() > 0, "there is no ", type, " device");
  if (s.type != type) s.launches.clear();
  s.type = type;
  s.clocks.clear();
  for (auto& moment : s.moments) moment.store(0, std::memory_order_relaxed);
  for (auto& used : s.in_use) used.store(false, std::memory_order_relaxed);
  s.wishes.failed.store(false, std::memory_order_relaxed);
  s.failure[0] = '\0';
  s.calibrated_at = s.tried_at = steady_ns();
  // Where the device does not answer at once, or is not in use yet, this is done again when it has come to a mark.
  c10::Device current = s.guard->getDevice();
  if (!has_context(at::globalContext(), type, current.index())) return;
  if (!is_capturing(*s.guard, s.guard->getStream(current))) calibrate(s, current.index(), kFirstWait);
}

// Under `control`: tells those who record what is requested.
void publish_wishes(State& s) {
  uint32_t ops = 0, all = 0, labels = 0;
  for (auto& session : s.sessions) {
    if (session->paused) continue;
    if (session->which != OTP_DEVICE_EVENTS_LABELS) ops |= session->consumer;
    if (session->which == OTP_DEVICE_EVENTS_ALL) all |= session->consumer;
    labels |= session->consumer;
  }
  s.wishes.all.store(all, std::memory_order_relaxed);
  s.wishes.labels.store(labels, std::memory_order_release);
  s.wishes.ops.store(ops, std::memory_order_release);
}

Timed* find(State& s, int64_t token) {
  for (auto& session : s.sessions)
    if (session->token == token) return session.get();
  return nullptr;
}

// The token is the caller's before anything else can happen to him.
void start(State& s, uint32_t consumer, c10::DeviceType type, int which, uint64_t most, int64_t* token) {
  std::lock_guard<std::mutex> hold(s.control);
  try {
    open_type(s, type);
    start_collector(s);
    s.sessions.reserve(s.sessions.size() + 1);
    auto session = std::make_unique<Timed>(Timed{s.last_token + 1, consumer, which, most, false, {}, {}});
    session->counts.captured = s.captured[__builtin_ctz(consumer)].load(std::memory_order_relaxed);
    session->counts.failed = s.refused[__builtin_ctz(consumer)].load(std::memory_order_relaxed);
    for (auto& before : s.sessions)
      if (before->consumer == consumer) before->until = std::min(before->until, session->token);
    *token = session->token;
    s.last_token.store(session->token, std::memory_order_relaxed);
    s.sessions.push_back(std::move(session));
  } catch (...) {
    if (s.sessions.empty() && s.guard != nullptr) close_type(s);
    throw;
  }
  publish_wishes(s);
  g_devices_api->set_device_source(&kDeviceSource);
}

// Until what had ended before is read back, or the time is over. How much is not.
uint64_t collect_until(State& s, int64_t wait_ns) {
  int64_t until = steady_ns() + wait_ns;
  std::unique_lock<std::mutex> hold(s.control);
  collect(s, kPatience);
  uint64_t added = s.waiting.added();
  auto pause = std::chrono::microseconds(50);
  while (s.waiting.before(added) != 0 && !is_off(s) && steady_ns() < until) {
    hold.unlock();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(5000));
    hold.lock();
    collect(s);
  }
  return s.waiting.before(added);
}

template <typename T>
T* new_column(uint64_t count) {
  return static_cast<T*>(std::malloc(std::max<size_t>(count * sizeof(T), 1)));
}

// Under `control`.
int take(State& s, Timed& session, otp_device_times* out) {
  uint64_t count = session.times.size();
  *out = {count,
          new_column<uint64_t>(count),
          new_column<int64_t>(count),
          new_column<int64_t>(count),
          new_column<int64_t>(count),
          new_column<int32_t>(count),
          new_column<int32_t>(count)};
  if (!out->event || !out->start || !out->duration || !out->stream || !out->device_type || !out->device_index) {
    otp_torch_devices_free(out);
    return OTP_E_NO_MEMORY;
  }
  for (uint64_t i = 0; i < count; ++i) {
    const Time& time = session.times[i];
    out->event[i] = time.id;
    out->start[i] = s.clocks[static_cast<size_t>(time.device_index)]->unix_ns(time.moment, time.begin_ms);
    out->duration[i] = std::llround(time.duration_ms * 1e6);
    out->stream[i] = time.stream;
    out->device_type[i] = static_cast<int32_t>(s.type);
    out->device_index[i] = time.device_index;
  }
  session.times = {};
  return OTP_OK;
}

// Under `control`.
otp_device_counts counts_of(State& s, const Timed& session) {
  otp_device_counts counts = session.counts;
  int bit = __builtin_ctz(session.consumer);
  counts.waiting = s.waiting.count([&](const Pair& pair) { return session.requests(pair); });
  counts.captured = s.captured[bit].load(std::memory_order_relaxed) - counts.captured;
  counts.failed = s.refused[bit].load(std::memory_order_relaxed) - counts.failed;
  return counts;
}

// Ends the thread that collects, unless somebody has started meanwhile.
void end_all(State& s) {
  end_collector(s);
  std::lock_guard<std::mutex> hold(s.control);
  if (s.sessions.empty()) return close_type(s);
  try {
    start_collector(s);
  } catch (...) {  // no thread is left: those who record look from time to time, and whoever stops does
    return;
  }
}

int stop(State& s, int64_t token, int64_t wait_ns, otp_device_times* times, otp_device_counts* counts) {
  {
    std::lock_guard<std::mutex> hold(s.control);
    Timed* session = find(s, token);
    if (session == nullptr) return OTP_OK;  // a forked child's parent has it
    session->paused = true;
    publish_wishes(s);
  }
  collect_until(s, wait_ns);
  int status;
  bool last;
  {
    std::lock_guard<std::mutex> hold(s.control);
    try {
      if (!is_off(s) && !may_break_capture(s)) calibrate_all(s);
    } catch (...) {
      fail(s, 0);
    }
    Timed* session = find(s, token);
    if (session == nullptr) return OTP_OK;  // another thread has stopped it meanwhile
    status = take(s, *session, times);
    *counts = counts_of(s, *session);
    (s.wishes.failed.load(std::memory_order_acquire) ? counts->failed : counts->late) += counts->waiting;
    std::erase_if(s.sessions, [&](const auto& one) { return one->token == token; });
    last = s.sessions.empty();
  }
  if (last) end_all(s);
  return status;
}

// Tokens continue: what the parent has started must not be taken for what the child starts.
alignas(State) unsigned char g_memory[sizeof(State)];

void forget_in_forked_child() {
  int64_t last_token = state().last_token.load(std::memory_order_relaxed);
  auto* made = new (g_memory) State(state().generation + 1);
  made->last_token.store(last_token, std::memory_order_relaxed);
}

}  // namespace
}  // namespace otp::devices

using otp::devices::state;

extern "C" {

__attribute__((visibility("default"))) void otp_torch_attach_devices(const otp_api* api) {
  if (otp::devices::g_devices_api != nullptr) return;
  otp::devices::g_devices_api = api;
  otp::devices::g_state.store(new (otp::devices::g_memory) otp::devices::State(1), std::memory_order_release);
  pthread_atfork(nullptr, nullptr, otp::devices::forget_in_forked_child);
}

__attribute__((visibility("default"))) int otp_torch_devices_start(uint32_t consumer, const char* type, int which,
                                                                   uint64_t most, int64_t* token, char* why,
                                                                   uint32_t size) try {
  otp::devices::start(state(), consumer, c10::Device(type).type(), which, most, token);
  return OTP_OK;
} catch (const c10::Error& error) {
  std::snprintf(why, size, "%s", error.what_without_backtrace());
  return -1;
} catch (const std::exception& error) {
  std::snprintf(why, size, "%s", error.what());
  return -1;
}

__attribute__((visibility("default"))) void otp_torch_devices_pause(int64_t token, int paused) {
  otp::devices::State& s = state();
  std::lock_guard<std::mutex> hold(s.control);
  otp::devices::Timed* session = otp::devices::find(s, token);
  if (session == nullptr) return;
  session->paused = paused != 0;
  otp::devices::publish_wishes(s);
}

__attribute__((visibility("default"))) void otp_torch_devices_hold(int captures) {
  otp::devices::State& s = state();
  s.wishes.held.store(captures, std::memory_order_relaxed);
  if (captures != 0) std::lock_guard<std::mutex> hold(s.control);  // whoever is asking a device has finished
}

__attribute__((visibility("default"))) uint64_t otp_torch_devices_collect(int64_t wait_ns) {
  return otp::devices::collect_until(state(), wait_ns);
}

__attribute__((visibility("default"))) int otp_torch_devices_take(int64_t token, otp_device_times* out) {
  otp::devices::State& s = state();
  std::lock_guard<std::mutex> hold(s.control);
  otp::devices::Timed* session = otp::devices::find(s, token);
  *out = {};
  return session == nullptr ? OTP_OK : otp::devices::take(s, *session, out);
}

__attribute__((visibility("default"))) void otp_torch_devices_free(otp_device_times* times) {
  std::free(times->event);
  std::free(times->start);
  std::free(times->duration);
  std::free(times->stream);
  std::free(times->device_type);
  std::free(times->device_index);
  *times = {};
}

__attribute__((visibility("default"))) int otp_torch_devices_stop(int64_t token, int64_t wait_ns,
                                                                  otp_device_times* times,
                                                                  otp_device_counts* counts) try {
  return otp::devices::stop(state(), token, wait_ns, times, counts);
} catch (...) {  // what is left goes with the next stop
  return OTP_E_NO_MEMORY;
}

__attribute__((visibility("default"))) void otp_torch_devices_counts(int64_t token, otp_device_counts* out) {
  otp::devices::State& s = state();
  std::lock_guard<std::mutex> hold(s.control);
  const otp::devices::Timed* session = otp::devices::find(s, token);
  *out = session == nullptr ? otp_device_counts{} : otp::devices::counts_of(s, *session);
}

__attribute__((visibility("default"))) void otp_torch_devices_stats(otp_device_stats* out) {
  otp::devices::State& s = state();
  std::lock_guard<std::mutex> hold(s.control);
  *out = {};
  out->events_made = s.made.load(std::memory_order_relaxed);
  out->events_alive = out->events_made - s.destroyed.load(std::memory_order_relaxed);
  out->waiting = s.waiting.size();
  out->uncertainty_ns = -1;
  for (const auto& clock : s.clocks) {
    if (clock == nullptr) continue;
    out->calibrations += clock->moments();
    out->uncertainty_ns = clock->uncertainty_ns();
  }
}

__attribute__((visibility("default"))) void otp_torch_devices_failure(char* why, uint32_t size) {
  otp::devices::State& s = state();
  std::snprintf(why, size, "%s", s.wishes.failed.load(std::memory_order_acquire) ? s.failure : "");
}

__attribute__((visibility("default"))) void otp_torch_devices_exit(void) {
  otp::devices::g_exiting.store(true, std::memory_order_relaxed);
  otp::devices::end_collector(state());
}

}  // extern "C"
