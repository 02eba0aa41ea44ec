// Copies the stack of a thread that continues meanwhile, as it was at one moment or within about a microsecond of it.
//
// Since Python 3.11 frames lie in chunks of memory, each call's above its caller's: the pages from the innermost one
// down are copied at once. Frames that lie elsewhere (of generators, of calls from C, all of Python 3.10) come with the
// same copy where they were at the thread's last reading, and one by one otherwise.
//
// A copy is no snapshot: while it is made, calls return, and others take their memory. It counts if the innermost frame
// is the same before and after; otherwise if it ends in the same outermost call as before, from where on each frame
// lies right above that of its caller. What is stale is cut off then: the calls around it are those that ran at the end
// of the copy. To wait for a quiet moment instead would prefer lines that block to lines that call.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_RUNNING_STACK_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_RUNNING_STACK_H_

#include <sys/uio.h>

#include <cstdint>

#include "stack_reader.h"

namespace otp_python {

// What is known of a thread's stack from its last reading.
struct StackHints {
  static constexpr uint32_t kMost = 128;
  uintptr_t apart[kMost];  // frames outside of chunks, the innermost first
  uint32_t count = 0;
  uintptr_t root = 0;                       // the outermost frame; 0: not known
  uintptr_t odd_root = 0;                   // that of a generator, in which the last reading seemed to end
  uintptr_t holder = 0, low = 0, high = 0;  // where the innermost frame was named, and the pages with the frames
};

// Of one thread that reads.
class RunningStackReader {
 public:
  enum class Found { kStack, kNoPython, kTorn };

  // `state`: of the interpreter, of the thread with this ident; it may have ended.
  Found read(uintptr_t state, uint64_t ident, StackHints* hints, StackCopy* out);

 private:
  static constexpr uintptr_t kPage = 4096;
  static constexpr uint32_t kPages = 4;         // that are copied at once
  static constexpr size_t kFrameBytes = 128;    // of which a layout has the fields
  static constexpr size_t kThreadBytes = 1024;  // and of these
  static constexpr uint32_t kSizes = 4096;

  // Where a thread's innermost frame is said to be.
  struct Top {
    uintptr_t holder, frame;
  };
  struct FrameSize {
    uintptr_t code, bytes;
  };

  // The innermost frame, and what was needed last time: all in one copy.
  bool copy_top(uintptr_t state, uint64_t ident, const StackHints& hints, Top* out);
  bool is_still(uintptr_t state, const Top& top);
  // A window of pages down from a frame.
  void copy_pages(uintptr_t frame);
  const char* frame_at(uintptr_t frame);
  bool walk(uintptr_t frame, StackCopy* out);
  bool is_sound_root(const StackHints& hints, uintptr_t before, int attempt) const;
  void keep_hints(const Top& top, const StackCopy& stack, StackHints* hints) const;
  void learn_sizes(const StackCopy& stack);
  uint32_t first_sound(const StackCopy& stack) const;

  uintptr_t d_low = 0, d_high = 0;  // the window: what of it was copied
  uintptr_t d_window = 0;           // and where it begins
  uint32_t d_count = 0, d_next = 0;
  bool d_is_odd = false;  // the outermost frame is a generator's
  uintptr_t d_at[StackHints::kMost];
  bool d_is_stacked[StackCopy::kMost];
  StackHints d_apart;
  FrameSize d_sizes[kSizes] = {};
  char d_pages[(kPages + 1) * kPage];
  char d_frames[StackHints::kMost + 1][kFrameBytes];
};

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_RUNNING_STACK_H_
