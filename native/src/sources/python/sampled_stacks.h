// The different stacks of samples: a tree of calls, outermost first, that only grows. The number of a stack is that of
// its innermost call; 0 is the empty stack.
//
// One thread adds; any thread may read what is published, without a lock, also in a forked child, which continues with
// what its parent had.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_SAMPLED_STACKS_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_SAMPLED_STACKS_H_

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "code_reader.h"
#include "number_table.h"

namespace otp_python {

// File of a call that stands for a wait for the interpreter's lock; its line is the number of another stack.
constexpr std::string_view kWaitsForLock = "<waits for GIL>";

struct SampledFunction {
  std::string file, name;
};
struct SampledCall {
  uint32_t parent;
  uint32_t function;
  int line;
};
uint32_t sampled_stack_count();
// Of a stack below sampled_stack_count(), not the empty one.
const SampledCall& sampled_call(uint32_t stack);
const SampledFunction& sampled_function(uint32_t function);

// Of the thread that adds. Its functions may throw std::bad_alloc.
class StackTree {
 public:
  // Finds what is published already.
  StackTree();
  // The number of a function; 0: there are too many.
  uint32_t function(std::string_view file, std::string_view name);
  // The stack with one more call; the stack itself: there are too many.
  uint32_t call(uint32_t stack, uint32_t function, int line);

 private:
  NumberTable<uint32_t> d_calls;
  std::unordered_map<std::string, uint32_t> d_functions;
};

// The codes that were met, by their addresses. Of one thread.
class KnownCodes {
 public:
  // `own`: directory whose calls are left out.
  explicit KnownCodes(std::string own) : d_own(std::move(own)) {}
  // The number of a stack that was just copied; kTorn where some call's code is none, or not where the call is in it.
  // `before`: the calls of that thread's last stack; gets these. The outermost calls of both that are at the same
  // instruction have the same codes: of those only one is verified each time, since it costs a microsecond.
  static constexpr uint32_t kTorn = UINT32_MAX;
  uint32_t stack_of(const StackCopy& stack, StackTree* tree, std::vector<CallCopy>* before);
  // Whether the last stack lacks calls that the tree had no room for.
  bool is_cut() const { return d_is_cut; }

 private:
  struct Code {
    CodeHead head;
    uint32_t function = 0;     // 0: its calls are left out
    bool has_no_room = false;  // for that reason
    std::vector<LineRange> lines;
    uint64_t seen = 0;  // the number of the stack that it was verified for
  };

  bool learn(uintptr_t address, StackTree* tree, Code* out) const;
  void verify(const StackCopy& stack, StackTree* tree, const std::vector<CallCopy>& before);
  void check_batch(const uintptr_t* addresses, uint32_t count, StackTree* tree);

  std::string d_own;
  bool d_is_cut = false;
  uint64_t d_stack = 0;
  std::unordered_map<uintptr_t, Code> d_codes;
};

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_SAMPLED_STACKS_H_
