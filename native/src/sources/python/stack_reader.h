// Copies the stacks of Python's threads while they run, as each was at one moment or within about a microsecond of it:
// no lock of Python's, no allocation, bounded time, any thread.
//
// The interpreter may free and reuse whatever is read here at any moment, so nothing of it is followed: all is copied
// by process_vm_readv from the own process, where a bad address is an error and no signal.
//
// Since Python 3.11 frames lie in chunks of memory, each call's above its caller's: the pages from the innermost one
// down are copied at once. Frames that lie elsewhere (of generators, of calls from C, all of Python 3.10) come with the
// same copy where they were at the thread's last reading, and one by one otherwise.
//
// A copy is no snapshot: while it is made, calls return, and others take their memory. It counts if the innermost frame
// is the same before and after; otherwise if it ends in the same outermost call as before, from where on each frame
// lies right above that of its caller. What is stale is cut off then: the calls around it are those that ran at the end
// of the copy. To wait for a quiet moment instead would prefer lines that block to lines that call. Where there are no
// chunks, a second copy shows what is stale.
//
// stack_layout.h finds out where the interpreter keeps all this. Before that, nothing here may be called.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_STACK_READER_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_STACK_READER_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace otp_python {

constexpr int kNone = -1;
constexpr int kWord = sizeof(uintptr_t);

// Where the fields are, in bytes; kNone: this version has none.
struct StackLayout {
  uintptr_t interpreter = 0, code_type = 0, text_type = 0, bytes_type = 0;
  int first_thread = kNone;                               // of the interpreter
  int thread_frame = kNone, thread_frame_holder = kNone;  // of a thread: the frame, or what points to it there
  int thread_ident = kNone, thread_tid = kNone, pthread_tid = kNone;  // the system's id: of the thread, or of pthread_t
  int frame_code = kNone, frame_caller = kNone, frame_instruction = kNone, frame_owner = kNone;
  int code_file = kNone, code_name = kNone, code_lines = kNone, code_first_line = kNone;
  int code_instructions =
      kNone;  // with it the line table is that of Python 3.11; without it, an index and that of 3.10
  int text_flags_shift = kNone, text_head = kNone;
};
extern StackLayout g_stack_layout;

// Copies memory of the own process. False, with errno: it is not there, or that is not permitted.
bool copy_memory(uintptr_t from, void* to, size_t bytes);

// Pieces of memory of the own process that are copied at once, until the first that is not there.
class Pieces {
 public:
  static constexpr uint32_t kMost = 132;

  void add(uintptr_t from, void* to, size_t bytes) {
    d_here[d_count] = {to, bytes};
    d_there[d_count++] = {reinterpret_cast<void*>(from), bytes};
  }
  // How many were copied.
  uint32_t copy();

 private:
  iovec d_here[kMost], d_there[kMost];
  uint32_t d_count = 0;
};

template <typename T>
bool copy_value(uintptr_t from, T* out) {
  return copy_memory(from, out, sizeof *out);
}

// Of what was copied.
template <typename T>
T field(const void* copied, int at) {
  T value;
  std::memcpy(&value, static_cast<const char*>(copied) + at, sizeof value);
  return value;
}

struct CallCopy {
  uintptr_t frame;
  uintptr_t code;
  uintptr_t instruction;

  bool operator==(const CallCopy& other) const {
    return frame == other.frame && code == other.code && instruction == other.instruction;
  }
};

struct StackCopy {
  static constexpr uint32_t kMost = 512;
  CallCopy calls[kMost];  // the innermost first
  uint32_t count;
  bool is_whole;  // else calls began or ended meanwhile, and some that are here may be over
  bool is_cut;    // there are more calls around these
};
// Whether its frame still runs its code.
bool is_there(const CallCopy& call);

// What is known of a thread's stack from its last reading.
struct StackHints {
  static constexpr uint32_t kMost = 128;
  uintptr_t apart[kMost];  // frames outside of chunks, the innermost first
  uint32_t count = 0;
  uintptr_t root = 0;                       // the outermost frame; 0: not known
  uintptr_t odd_root = 0;                   // that of a generator, in which the last readings seemed to end
  uint32_t odd_readings = 0;                // so many
  uintptr_t holder = 0, low = 0, high = 0;  // where the innermost frame was named, and the pages with the frames
};

// Of one thread that reads.
class StackReader {
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
  uint32_t first_agreed(const StackCopy& stack);

  uintptr_t d_low = 0, d_high = 0;  // the window: what of it was copied
  uintptr_t d_window = 0;           // and where it begins
  uint32_t d_count = 0, d_next = 0;
  bool d_is_odd = false;  // the outermost frame is a generator's
  uintptr_t d_at[StackHints::kMost];
  bool d_is_stacked[StackCopy::kMost];
  StackHints d_apart;
  StackCopy d_former;  // where there are no chunks: the latest copy
  FrameSize d_sizes[kSizes] = {};
  char d_pages[(kPages + 1) * kPage];
  char d_frames[StackHints::kMost + 1][kFrameBytes];
};

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_STACK_READER_H_
