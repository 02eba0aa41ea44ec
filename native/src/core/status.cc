// What the recorder says of itself.
#include <cstdlib>

#include "core/registry.h"

#ifndef OTP_PACKAGE_VERSION
#define OTP_PACKAGE_VERSION "unknown"
#endif

extern "C" {

const char* otp_version(void) { return OTP_PACKAGE_VERSION; }

const char* otp_status_text(int status) {
  switch (status) {
    case OTP_OK:
      return "no error";
    case OTP_E_NO_MEMORY:
      return "the system gave no memory";
    case OTP_E_TOO_MANY_SESSIONS:
      return "16 recordings hold data already; read or close one of them first";
    case OTP_E_BUDGET_TOO_SMALL:
      return "the memory budget is smaller than one chunk of 65536 bytes";
    case OTP_E_STATE:
      return "the recording is not in a state that allows this (started twice, stopped before its start, or being read "
             "by another thread)";
    case OTP_E_FORKED:
      return "the recording belongs to the parent process: in a forked child start a new one";
    case OTP_E_VERSION:
      return "built for another version of the recorder";
    case OTP_E_NO_BLACKBOX:
      return "no image of a black box that this version can read";
    default:
      return "unknown status";
  }
}

void otp_get_recorder_stats(otp_recorder_stats* out) {
  otp::Registry& all = otp::registry();
  *out = otp_recorder_stats{};
  out->names = all.interner.view().count;
  for (uint32_t kind = 0; kind < OTP_NAME_KINDS; ++kind)
    out->names_refused[kind] = all.interner.refused(static_cast<otp_name_kind>(kind));
  out->clock_steps = all.clock.steps();
  out->unmatched_ends = all.unmatched_ends.load(std::memory_order_relaxed);
  out->clock_is_tsc = otp::g_clock_is_tsc ? 1 : 0;
  out->forks = otp::g_generation.load(std::memory_order_relaxed);
  out->sessions = static_cast<uint32_t>(__builtin_popcount(otp::g_shared.running()));
  std::lock_guard<std::mutex> hold(all.mutex);
  out->threads = static_cast<uint32_t>(all.threads.size());
  out->chunk_bytes = all.pool.mapped_bytes();
}

void otp_names_view(otp_names* out) { *out = otp::registry().interner.view(); }

int64_t otp_now_ns(void) {
  uint64_t now = otp::ticks_now();
  return otp::registry().clock.unix_ns(now);
}

}  // extern "C"
