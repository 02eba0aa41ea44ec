#include "core/guarded_mapping.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <new>

namespace otp {

// Never freed, since a handler may be looking at it; used again.
struct MappedRange {
  std::atomic<uint8_t*> begin{nullptr};  // null: it is free
  std::atomic<uint64_t> bytes{0};
  std::atomic<bool> is_lost{false};
  MappedRange* next = nullptr;
};

namespace {

constexpr int kProtection = PROT_READ | PROT_WRITE;

std::atomic<MappedRange*> g_ranges{nullptr};
std::mutex g_control;  // of the handler, and of which ranges are free
int g_mapped = 0;

// By the system call itself, which a signal handler may make, and in which TSan sees no write to the range.
bool map_private(uint8_t* begin, uint64_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  return syscall(SYS_mmap, begin, bytes, kProtection, kFlags, -1, 0) != -1;
}

// The end of a file that was cut cannot be read: an error here, and no signal.
bool is_cut(uint8_t* begin, uint64_t bytes) {
  char byte;
  iovec to{&byte, 1}, from{begin + bytes - 1, 1};
  return syscall(SYS_process_vm_readv, getpid(), &to, 1, &from, 1, 0) < 0 && errno == EFAULT;
}

// Whether the signal is about the range. A handler that was installed after this one (faulthandler's) may have got the
// fault first and have raised the signal anew, which then says nothing of an address.
bool is_about(const siginfo_t& info, uint8_t* begin, uint64_t bytes) {
  auto* address = static_cast<uint8_t*>(info.si_addr);
  if (info.si_code > 0) return address >= begin && address < begin + bytes;
  return info.si_code == SI_TKILL && info.si_pid == getpid() && is_cut(begin, bytes);
}

// True: the instruction that faulted can be repeated.
bool replace_lost_range(const siginfo_t& info) {
  for (MappedRange* range = g_ranges.load(); range != nullptr; range = range->next) {
    uint8_t* begin = range->begin.load();
    if (begin == nullptr || !is_about(info, begin, range->bytes.load())) continue;
    // Where another thread is mapping it at this moment, this one faults again until that is done.
    if (range->is_lost.exchange(true) || map_private(begin, range->bytes.load())) return true;
    range->is_lost.store(false);
    return false;
  }
  return false;
}

// To the action of before, as the kernel would have done it.
void pass_on(const struct sigaction& before, siginfo_t* info, void* context) {
  bool is_handler = before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN;
  if (is_handler && (before.sa_flags & SA_RESETHAND) == 0) {
    if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(SIGBUS, info, context);
    return before.sa_handler(SIGBUS);
  }
  bool is_repeated = info->si_code > 0 && info->si_code != BUS_MCEERR_AO;  // by the instruction that faulted
  if (!is_repeated && before.sa_handler == SIG_IGN) return;
  sigaction(SIGBUS, &before, nullptr);
  if (!is_repeated) syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), SIGBUS, info);
}

// One handler for each action that it was put on top of. A handler that was installed over one of these, and calls it,
// is thereby led to what was there before itself, and never in a circle.
constexpr int kLayers = 8;
struct sigaction g_before[kLayers];
int g_layers = 0;

template <int Layer>
void on_sigbus(int, siginfo_t* info, void* context) {
  int saved = errno;
  bool is_done = replace_lost_range(*info);
  errno = saved;
  if (!is_done) pass_on(g_before[Layer], info, context);
}

using Handler = void (*)(int, siginfo_t*, void*);
constexpr Handler kHandlers[kLayers] = {on_sigbus<0>, on_sigbus<1>, on_sigbus<2>, on_sigbus<3>,
                                        on_sigbus<4>, on_sigbus<5>, on_sigbus<6>, on_sigbus<7>};

// Of our handlers, the one that is installed; -1: none.
int installed_layer(struct sigaction* now) {
  if (sigaction(SIGBUS, nullptr, now) != 0 || (now->sa_flags & SA_SIGINFO) == 0) return -1;
  for (int layer = 0; layer < kLayers; ++layer)
    if (now->sa_sigaction == kHandlers[layer]) return layer;
  return -1;
}

// Without effect where the program has set more handlers, one after another, than there are layers.
void install_locked() {
  struct sigaction now;
  if (installed_layer(&now) >= 0) return;
  int layer = 0;
  while (layer < g_layers && g_before[layer].sa_handler != now.sa_handler) ++layer;
  if (layer == kLayers) return;
  g_before[layer] = now;
  if (layer == g_layers) ++g_layers;
  bool is_handler = now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN;
  struct sigaction ours{};
  if (is_handler) ours = now;  // with the signals that it blocks, and on its stack
  ours.sa_sigaction = kHandlers[layer];
  ours.sa_flags = SA_SIGINFO | (is_handler ? now.sa_flags & ~SA_RESETHAND : SA_ONSTACK | SA_RESTART);
  sigaction(SIGBUS, &ours, nullptr);
}

void uninstall() {
  struct sigaction now;
  int layer = installed_layer(&now);
  if (layer >= 0) sigaction(SIGBUS, &g_before[layer], nullptr);
}

MappedRange* free_range_locked() {
  for (MappedRange* range = g_ranges.load(); range != nullptr; range = range->next)
    if (range->begin.load() == nullptr) return range;
  auto* range = new MappedRange;
  range->next = g_ranges.load();
  g_ranges.store(range);
  return range;
}

}  // namespace

GuardedMapping::GuardedMapping(int fd, uint64_t bytes) : d_bytes(bytes) {
  std::lock_guard<std::mutex> hold(g_control);
  d_range = free_range_locked();
  void* memory = mmap(nullptr, bytes, kProtection, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  d_begin = static_cast<uint8_t*>(memory);
  d_range->is_lost.store(false);
  d_range->bytes.store(bytes);
  d_range->begin.store(d_begin);
  ++g_mapped;
  install_locked();
}

GuardedMapping::~GuardedMapping() {
  munmap(d_begin, d_bytes);
  forget_range();
}

bool GuardedMapping::is_lost() const { return d_range != nullptr && d_range->is_lost.load(); }

void GuardedMapping::detach() {
  if (d_range != nullptr && map_private(d_begin, d_bytes)) forget_range();
}

void GuardedMapping::forget_range() {
  if (d_range == nullptr) return;
  std::lock_guard<std::mutex> hold(g_control);
  d_range->begin.store(nullptr);
  d_range = nullptr;
  if (--g_mapped == 0) uninstall();
}

void GuardedMapping::guard_again() {
  struct sigaction now;
  if (installed_layer(&now) >= 0) return;
  std::lock_guard<std::mutex> hold(g_control);
  if (g_mapped != 0) install_locked();
}

void GuardedMapping::abandon_all_in_child() {
  for (MappedRange* range = g_ranges.load(); range != nullptr; range = range->next)
    if (uint8_t* begin = range->begin.exchange(nullptr)) map_private(begin, range->bytes.load());
  new (&g_control) std::mutex;
  g_mapped = 0;
  uninstall();
}

}  // namespace otp
