// Timing events of a device: made, recorded, asked, through torch's device guard interface; and the device's clock
// beside the recorder's.
#pragma once

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "otel_torchprof/recorder.h"

namespace otp::devices {

using Guard = c10::impl::DeviceGuardImplInterface;

// While any thread captures a stream in CUDA's global mode, asking for an event on another thread would break that
// capture. A thread in relaxed mode is exempt. Nothing where the library of the device has no such mode.
class RelaxedCapture {
 public:
  static bool is_possible() { return exchange() != nullptr; }
  RelaxedCapture() {
    if (exchange() != nullptr) exchange()(&d_mode);
  }
  ~RelaxedCapture() {
    if (exchange() != nullptr) exchange()(&d_mode);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  using Exchange = int (*)(int*);
  static Exchange exchange() {
    static const auto found = [] {
      void* function = dlsym(RTLD_DEFAULT, "cudaThreadExchangeStreamCaptureMode");
      if (function == nullptr) function = dlsym(RTLD_DEFAULT, "hipThreadExchangeStreamCaptureMode");
      return reinterpret_cast<Exchange>(function);
    }();
    return found;
  }
  static constexpr int kRelaxed = 2;  // cudaStreamCaptureModeRelaxed
  int d_mode = kRelaxed;
};

// CUDA's own answer, for a torch that has none: its stream of one of torch's, and the question. A c10::cuda::CUDAStream
// is a c10::Stream and nothing besides.
inline bool is_cuda_capturing(const c10::Stream& stream) {
  using Handle = void* (*)(const c10::Stream*);
  using Ask = int (*)(void*, int*);
  static const auto handle = [] {
    void* library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* function = library == nullptr ? nullptr : dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv");
    return reinterpret_cast<Handle>(function);
  }();
  static const auto ask = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing"));
  int status = 0;  // cudaStreamCaptureStatusNone
  return handle != nullptr && ask != nullptr && ask(handle(&stream), &status) == 0 && status != 0;
}

// Torch before 2.12 cannot be asked. Where it times other devices than CUDA's, whoever captures is then known only by
// otp_torch_devices_hold. A template, so that what an older torch does not have is left out.
template <typename AnyGuard>
bool is_capturing(const AnyGuard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    return stream.device_type() == c10::DeviceType::CUDA && is_cuda_capturing(stream);
  }
}

// Where it throws, the event may be one that is no more (XPU gives the old one up before it makes the new one), and the
// caller has to forget it; the current device is as it was.
inline void record(const Guard& guard, void** event, const c10::Stream& stream) {
  constexpr auto kTimed = c10::EventFlag::BACKEND_DEFAULT;
  std::optional<RelaxedCapture> relaxed;
  if (*event == nullptr) relaxed.emplace();  // making an event is no work of a stream
  if (guard.deviceCount() == 1) return guard.record(event, stream, stream.device_index(), kTimed);
  c10::Device before = guard.getDevice();
  try {
    guard.record(event, stream, stream.device_index(), kTimed);
  } catch (...) {
    guard.uncheckedSetDevice(before);
    throw;
  }
}

// Whether the program uses a device: being the first who does costs half a second, and hundreds of MB of it. Templates,
// so that what an older torch does not have is left out.
template <typename Context>
bool has_context(Context& context, c10::DeviceType type, c10::DeviceIndex index) {
  if constexpr (requires { context.getAcceleratorHooksInterface(type).hasPrimaryContext(index); }) {
    try {
      return context.getAcceleratorHooksInterface(type).hasPrimaryContext(index);
    } catch (...) {  // a private backend without hooks does not tell
      return true;
    }
  } else {
    return true;
  }
}

// A moment on both clocks.
struct Moment {
  int64_t unix_ns;
  double ms_before;  // by the device, since the moment before this one
};

// The clock of one device, by calibration: an event is recorded on a stream that has nothing to do, and lies between
// two readings of our own clock. Done again every second, since the two clocks drift apart (by some 10 us a second) and
// the device tells distances in a float of milliseconds (exact to 0.1 us within a second).
//
// Not thread-safe.
class DeviceClock {
 public:
  DeviceClock(const Guard& guard, c10::Device device, const otp_api& api)
      : d_guard(guard), d_device(device), d_api(api) {}

  uint32_t moments() const { return static_cast<uint32_t>(d_first + d_moments.size()); }
  int64_t uncertainty_ns() const { return d_uncertainty_ns; }

  // False: the device did not get to it within the time.
  bool calibrate(int64_t wait_ns, std::atomic<uint64_t>* made) {
    RelaxedCapture relaxed;
    Spare best(d_spare, nullptr);
    int64_t best_at = 0, best_window = INT64_MAX;
    for (int attempt = 0; attempt < kAttempts && best_window > kGoodWindow; ++attempt) {
      void* taken = take_spare();
      if (taken == nullptr) made->fetch_add(1, std::memory_order_relaxed);
      int64_t before = d_api.unix_ns(0), after = 0;
      record(d_guard, &taken, stream());
      Spare event(d_spare, taken);
      bool done = false;
      do {
        done = d_guard.queryEvent(event.held);
        after = d_api.unix_ns(0);
      } while (!done && after - before < wait_ns);
      if (!done) break;  // it is used again only when it is
      if (after - before >= best_window) continue;
      std::swap(event.held, best.held);
      best_window = after - before;
      best_at = before + best_window / 2;
    }
    if (best.held == nullptr) return false;
    add(best.held, best_at, best_window);
    best.held = nullptr;
    return true;
  }

  // Milliseconds from a moment to an event that is done. The events of old moments are destroyed: what began with one,
  // such as a label around an hour's work, is told from the oldest one that is left, over the moments between. Nothing
  // where there was no moment yet.
  std::optional<double> since(uint32_t moment, void* event) const {
    if (d_events.empty()) return std::nullopt;
    size_t oldest = d_moments.size() - d_events.size(), at = place(moment);
    if (moment != 0 && at >= oldest) return elapsed(d_events[at - oldest], event);
    double between = 0;
    for (size_t i = at + 1; i <= oldest; ++i) between += d_moments[i].ms_before;
    return between - elapsed(event, d_events[0]);
  }

  double elapsed(void* from, void* to) const { return d_guard.elapsedTime(from, to, d_device.index()); }

  // The time of what lies so many ms behind a moment, at the rate at which the clocks ran around it. `moment`: how many
  // there were; 0 counts from the first one, backwards.
  int64_t unix_ns(uint32_t moment, double ms) const {
    if (d_moments.empty()) return 0;
    size_t at = place(moment);
    return d_moments[at].unix_ns + std::llround(ms * rate(at));
  }

  // Gives the events back to the device's library. The moments stay, so that times can still be told.
  void destroy_events() {
    for (void* event : d_events) d_guard.destroyEvent(event, d_device.index());
    for (void* event : d_spare) d_guard.destroyEvent(event, d_device.index());
    d_events.clear();
    d_spare.clear();
  }
  size_t events() const { return d_events.size() + d_spare.size(); }

 private:
  // Where a moment is kept; the first one for what came before any, or is forgotten.
  size_t place(uint32_t moment) const {
    size_t at = moment == 0 || moment - 1 < d_first ? 0 : moment - 1 - d_first;
    return std::min(at, d_moments.size() - 1);
  }

  static constexpr int kAttempts = 5;
  static constexpr int64_t kGoodWindow = 5'000;
  static constexpr size_t kEvents = 64, kMoments = 65536;
  static constexpr double kNsPerMs = 1e6;

  // ns of our clock in a ms of the device.
  double rate(size_t at) const {
    size_t next = at + 1 < d_moments.size() ? at + 1 : at;
    if (next == 0 || d_moments[next].ms_before < kLongEnoughMs) return kNsPerMs;
    double ns = static_cast<double>(d_moments[next].unix_ns - d_moments[next - 1].unix_ns);
    double found = ns / d_moments[next].ms_before;
    return std::abs(found - kNsPerMs) < kNsPerMs / 100 ? found : kNsPerMs;  // else the wall clock was set
  }
  static constexpr double kLongEnoughMs = 100;

  // An event that goes back to the spare ones, also where the device's library throws.
  struct Spare {
    Spare(std::vector<void*>& spare, void* event) : to(spare), held(event) {}
    ~Spare() {
      if (held != nullptr) to.push_back(held);
    }
    Spare(const Spare&) = delete;
    Spare& operator=(const Spare&) = delete;

    std::vector<void*>& to;
    void* held;
  };

  void add(void* event, int64_t unix_ns, int64_t window) {
    d_moments.push_back({unix_ns, d_events.empty() ? 0 : elapsed(d_events.back(), event)});
    d_events.push_back(event);
    d_uncertainty_ns = (window + 1) / 2;
    if (d_events.size() > kEvents) {
      d_spare.push_back(d_events.front());
      d_events.pop_front();
    }
    if (d_moments.size() > kMoments) {
      d_moments.pop_front();
      ++d_first;
    }
  }

  void* take_spare() {
    if (d_spare.empty() || !d_guard.queryEvent(d_spare.back())) return nullptr;
    void* event = d_spare.back();
    d_spare.pop_back();
    return event;
  }

  // Torch's pool of streams is the program's too: one of high priority is the least likely to be in use. A device
  // without a pool is asked on its current stream.
  const c10::Stream& stream() {
    if (d_stream.has_value()) return *d_stream;
    try {
      d_stream = d_guard.getStreamFromGlobalPool(d_device, /*isHighPriority=*/true);
    } catch (...) {
      d_stream = d_guard.getStream(d_device);
    }
    return *d_stream;
  }

  const Guard& d_guard;
  c10::Device d_device;
  const otp_api& d_api;
  std::optional<c10::Stream> d_stream;
  std::deque<void*> d_events;  // of the last moments
  std::vector<void*> d_spare;
  std::deque<Moment> d_moments;
  size_t d_first = 0;  // how many have been forgotten
  int64_t d_uncertainty_ns = -1;
};

}  // namespace otp::devices
