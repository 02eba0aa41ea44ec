// The black box's beginning, and what its process says in it.
#include <algorithm>
#include <memory>
#include <new>
#include <sstream>

#include "core/registry.h"
#include "otel_torchprof/blackbox_format.h"

static_assert(sizeof(otp_blackbox_contents::stacks) == OTP_BLACKBOX_STACKS_BYTES, "the same limit");
static_assert(sizeof(otp_blackbox_contents::info) == OTP_BLACKBOX_INFO_BYTES, "the same limit");
static_assert(otp::Chunk::kHeader == OTP_BLACKBOX_CHUNK_HEADER, "as a reader knows it");

namespace otp {

namespace {

NamePolicy policy_of(const otp_blackbox_options& options) {
  NamePolicy policy;
  policy.hidden = options.hidden_names;
  policy.hides_shapes = options.hides_shapes != 0;
  policy.hides_threads = options.hides_threads != 0;
  std::istringstream lines(options.shown_names == nullptr ? "" : options.shown_names);
  for (std::string line; std::getline(lines, line);) policy.shown_labels.push_back(line);
  return policy;
}

otp_session_options session_options_of(const otp_blackbox_options& options) {
  otp_session_options found{};
  found.budget_bytes = options.bytes;  // all chunks of the box together are less
  found.full_policy = OTP_FULL_DROP_OLDEST;
  found.all_threads = 1;
  found.kinds = options.kinds;
  return found;
}

}  // namespace

std::atomic<uint32_t> g_box_is_open{0};

uint64_t collective_enqueued(const otp_blackbox_call* call) {
  ThreadBuffer* thread = t_buffer != nullptr ? t_buffer : this_thread_slowpath();
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (all.box == nullptr) return 0;
  uint64_t ticket = ++all.last_collective;
  if (thread != nullptr) ++thread->collectives;
  all.box->add_collective(ticket, *call, thread == nullptr ? 0 : thread->info.os_tid);
  return ticket;
}

void collective_completed(uint64_t ticket, int failed) {
  Registry& all = registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (all.box != nullptr && ticket != 0) all.box->complete_collective(ticket, failed != 0);
}

void open_box_locked(Registry& all, otp_session* session) {
  g_box_is_open.store(1, std::memory_order_relaxed);
  session->box->publish(session->mask());
  all.interner.set_box(session->box.get());
  all.clock.set_box(session->box.get());
  all.box = session->box.release();
  all.box_session = session;
}

void close_box_locked(Registry& all) {
  g_box_is_open.store(0, std::memory_order_relaxed);
  BlackBox* box = all.box;
  otp_session* session = all.box_session;
  all.interner.set_box(nullptr);
  all.clock.set_box(nullptr);
  all.note_box_losses();
  all.box = nullptr;
  all.box_session = nullptr;
  all.forget_held(session);
  if (box->close()) delete box;
}

}  // namespace otp

extern "C" {

int otp_blackbox_open(const otp_blackbox_options* options, otp_session** out) try {
  if (options->bytes < OTP_BLACKBOX_LEAST) return OTP_E_BUDGET_TOO_SMALL;
  otp_session_options requested = otp::session_options_of(*options);
  otp_session* session = nullptr;
  otp::registry();  // whose handler of forks is then there before the memory is
  auto box = std::make_unique<otp::BlackBox>(options->fd, options->bytes, otp::policy_of(*options));
  int status = otp_session_new(&requested, &session);
  if (status != OTP_OK) return status;
  session->box = std::move(box);
  status = otp_session_start(session);
  if (status != OTP_OK) {
    otp_session_free(session);
    return status;
  }
  *out = session;
  return OTP_OK;
} catch (const std::bad_alloc&) {
  return OTP_E_NO_MEMORY;
}

void otp_blackbox_set_info(const char* json, uint32_t size) {
  otp::Registry& all = otp::registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  if (all.box != nullptr) all.box->set_info({json, size});
}

uint32_t otp_blackbox_is_lost(void) {
  otp::Registry& all = otp::registry();
  std::lock_guard<std::mutex> hold(all.mutex);
  return all.box != nullptr && all.box->is_lost() ? 1 : 0;
}

}  // extern "C"
