// A device for tests, registered as torch's PrivateUse1: what torch asks a device for, and the way in for Python.
//
// Its memory is the host's, its kernels (simulated_kernels.cc) run on the CPU at once, and its time is that of
// simulated_queue.h.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "simulated_queue.h"

namespace simulated {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

std::atomic<int64_t> stalled_thread{0}, stalled_calls{0};

Device device_at(int index) { return {DeviceType::PrivateUse1, static_cast<DeviceIndex>(index)}; }

void require_device(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "the simulated machine has ", kDevices, " devices, and no ", index);
}

int index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

c10::Stream stream_of(int device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device_at(device), id); }

// Blocks of 512 bytes out of segments of 2 MiB that are never given back: the totals are told as CUDA's allocator does.
struct Memory final : c10::Allocator {
  struct Block {
    int64_t bytes;
    int device;
  };
  static constexpr size_t kHeader = 64;

  c10::DataPtr allocate(size_t n) override {
    const int device = current_device;
    if (n == 0) return {nullptr, nullptr, &release, device_at(device)};
    const size_t bytes = (n + 511) / 512 * 512;
    auto* block = static_cast<Block*>(std::aligned_alloc(kHeader, bytes + kHeader));
    TORCH_CHECK(block != nullptr, "the simulated device has no ", bytes, " bytes");
    *block = {static_cast<int64_t>(bytes), device};
    void* data = reinterpret_cast<char*>(block) + kHeader;
    report(data, block->bytes, device);
    return {data, data, &release, device_at(device)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }

  static void release(void* data) {
    if (data == nullptr) return;
    auto* block = reinterpret_cast<Block*>(static_cast<char*>(data) - kHeader);
    report(data, -block->bytes, block->device);
    std::free(block);
  }

  static void report(void* data, int64_t bytes, int device) {
    static std::mutex mutex;
    static std::array<int64_t, kDevices> allocated{};
    static std::array<int64_t, kDevices> reserved{};
    constexpr int64_t segment = 2 << 20;
    queues().allocation(bytes > 0, std::abs(bytes));
    size_t now_allocated = 0;
    size_t now_reserved = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      now_allocated = allocated[device] += bytes;
      reserved[device] = std::max(reserved[device], (allocated[device] + segment - 1) / segment * segment);
      now_reserved = reserved[device];
    }
    c10::reportMemoryUsageToProfiler(data, bytes, now_allocated, now_reserved, device_at(device));
  }
};

// Without `override` where older versions of torch have no such function.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::PrivateUse1; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Device getDevice() const override {
    queues().fail_for("get_device");
    return device_at(current_device);
  }
  void setDevice(Device device) const override {
    require_device(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    const Device before = device_at(current_device);
    setDevice(device);
    return before;
  }

  c10::Stream getStream(Device device) const override {
    queues().fail_for("get_stream");
    const int index = index_of(device);
    return stream_of(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(Device device, int priority) const override {
    return stream_of(index_of(device), queues().new_stream());
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool high) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int index = stream.device_index();
    return stream_of(index, std::exchange(current_streams[index], stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const {
    return reinterpret_cast<void*>(static_cast<intptr_t>((stream.device_index() + 1) * 0x10000 + stream.id()));
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
    for (bool told = false; stalled_thread == gettid(); told = true) {
      if (!told) ++stalled_calls;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    *event = queues().record(static_cast<Event*>(*event), key_of(stream), flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    queues().destroy(static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return queues().query(static_cast<Event*>(event)); }
  void block(void* event, const c10::Stream& stream) const override {
    queues().block(static_cast<Event*>(event), key_of(stream));
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    return queues().elapsed_ms(static_cast<Event*>(begin), static_cast<Event*>(end));
  }
  bool queryStream(const c10::Stream& stream) const override { return queues().query_stream(key_of(stream)); }
  bool isStreamCapturing(const c10::Stream& stream) const { return queues().is_capturing(key_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    queues().synchronize_stream(key_of(stream), /*counted=*/true);
  }
  void synchronizeEvent(void* event) const override { queues().synchronize_event(static_cast<Event*>(event)); }
  void synchronizeDevice(const DeviceIndex device) const {
    queues().synchronize_device(device < 0 ? current_device : device);
  }
};

// Devices that nobody has used so far, if torch asks.
std::array<std::atomic<bool>, kDevices> unused{};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(DeviceIndex index) const override { return !unused[index]; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device); }
  void setCurrentDevice(DeviceIndex index) const override {
    require_device(index);
    current_device = index;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const auto before = getCurrentDevice();
    setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  Device getDeviceFromPtr(void*) const override { return device_at(current_device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const Device device = storage.device();
    const int before = std::exchange(current_device, index_of(device));
    auto data = c10::GetAllocator(DeviceType::PrivateUse1)->allocate(bytes);
    current_device = before;
    if (storage.nbytes() > 0 && bytes > 0) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  c10::SetAllocator(DeviceType::PrivateUse1, new Memory);
  c10::impl::registerDeviceGuard(DeviceType::PrivateUse1, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace simulated

using simulated::queues;
#define SIMULATED extern "C" __attribute__((visibility("default")))

SIMULATED void simulated_reset() {
  simulated::current_device = 0;
  simulated::current_streams = {};
  for (auto& one : simulated::unused) one = false;
  queues().reset();
}
SIMULATED void simulated_mode(int mode) { queues().set_mode(static_cast<simulated::Mode>(mode)); }
SIMULATED int64_t simulated_complete(int device, int64_t stream, int64_t n) {
  return queues().complete({device, stream}, n);
}
SIMULATED void simulated_complete_all() { queues().complete_all(); }
SIMULATED void simulated_advance(int64_t ns) { queues().advance(ns); }
SIMULATED void simulated_duration(const char* name, int64_t ns) { queues().set_duration(name, ns); }
SIMULATED void simulated_kernel(const char* name, int device) {
  queues().kernel(name, simulated::current_stream(device));
}
SIMULATED void simulated_capture(int device, int64_t stream, int begins) {
  queues().capture({device, stream}, begins != 0);
}
SIMULATED void simulated_fail(const char* what, const char* text, int64_t times) { queues().fail(what, text, times); }
// While that thread (0: none) is stalled it waits where it records an event, as where the queue of a device is full.
SIMULATED void simulated_stall(int64_t thread) { simulated::stalled_thread = thread; }
SIMULATED int64_t simulated_stalled_calls() { return simulated::stalled_calls; }
SIMULATED int64_t simulated_count(int what, int64_t thread) { return queues().counted(what, thread); }
SIMULATED int64_t simulated_alive() { return queues().alive(); }
SIMULATED int64_t simulated_alive_most() { return queues().alive_most(); }
SIMULATED int64_t simulated_memory() { return queues().memory(); }
SIMULATED int64_t simulated_pending(int device, int64_t stream) { return queues().pending({device, stream}); }
SIMULATED int64_t simulated_time() { return queues().time(); }
SIMULATED int64_t simulated_new_stream() { return queues().new_stream(); }
SIMULATED int64_t simulated_exchange_stream(int device, int64_t stream) {
  return std::exchange(simulated::current_streams[device], stream);
}
SIMULATED int64_t simulated_current_stream(int device) { return simulated::current_streams[device]; }
SIMULATED int simulated_current_device() { return simulated::current_device; }
SIMULATED void simulated_unused(int device) { simulated::unused[device] = true; }
SIMULATED void simulated_set_device(int device) { simulated::current_device = device; }
SIMULATED int64_t simulated_violations(char* text, int64_t size) {
  const std::string found = queues().violations();
  if (size > 0) std::strncpy(text, found.c_str(), static_cast<size_t>(size) - 1)[size - 1] = 0;
  return static_cast<int64_t>(found.size());
}
