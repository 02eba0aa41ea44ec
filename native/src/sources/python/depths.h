// How deep each session with a maximum depth is on a thread: how many of the calls that are open there it has, of those
// that have begun since it came. Other sessions' calls are not its.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_DEPTHS_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_DEPTHS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "otel_torchprof/recorder.h"

namespace otp_python {

// Of one thread. Calls are told apart by their places in its list of what is open; those behind the last that was added
// are nobody's.
class Depths {
 public:
  uint32_t of(int session) const { return d_depth[session]; }

  // The call that comes to that place, the last in the list, is of these sessions.
  void add(size_t place, uint32_t sessions) {
    while (d_sessions.size() > place) remove(d_sessions.size() - 1);
    d_sessions.resize(place, 0);
    d_sessions.push_back(sessions);
    for (uint32_t rest = sessions; rest != 0; rest &= rest - 1) ++d_depth[__builtin_ctz(rest)];
  }

  // The call at that place leaves the list.
  void remove(size_t place) {
    if (place >= d_sessions.size()) return;
    for (uint32_t rest = d_sessions[place]; rest != 0; rest &= rest - 1) --d_depth[__builtin_ctz(rest)];
    d_sessions.erase(d_sessions.begin() + static_cast<std::ptrdiff_t>(place));
  }

  // These begin anew: nothing that is open counts for them.
  void forget(uint32_t sessions) {
    for (uint32_t& of_call : d_sessions) of_call &= ~sessions;
    for (uint32_t rest = sessions; rest != 0; rest &= rest - 1) d_depth[__builtin_ctz(rest)] = 0;
  }

  void clear() {
    d_sessions.clear();
    std::fill(std::begin(d_depth), std::end(d_depth), 0);
  }

 private:
  std::vector<uint32_t> d_sessions;         // by place
  uint32_t d_depth[OTP_MAX_SESSIONS] = {};  // by session
};

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_DEPTHS_H_
