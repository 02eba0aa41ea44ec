#include "sampled_stacks.h"

#include <algorithm>
#include <atomic>

namespace otp_python {

namespace {

constexpr uint32_t kMostCalls = 1u << 17, kMostFunctions = 1u << 15;
constexpr size_t kMostCodes = 1u << 15;  // that are known at a time
constexpr uint32_t kBatch = 64;          // codes that are copied at once
constexpr int kMostLine = 1 << 30;

// Pages that are not written to are not there.
SampledCall g_calls[kMostCalls];
SampledFunction* g_functions[kMostFunctions];
std::atomic<uint32_t> g_call_count{1}, g_function_count{1};

uint64_t key_of(const SampledCall& call) {
  return uint64_t{call.parent} << 46 | uint64_t{call.function} << 31 | static_cast<uint32_t>(call.line);
}

std::string text_of(std::string_view file, std::string_view name) {
  std::string text(file);
  text += '\0';
  return text += name;
}

}  // namespace

uint32_t sampled_stack_count() { return g_call_count.load(std::memory_order_acquire); }
const SampledCall& sampled_call(uint32_t stack) { return g_calls[stack]; }
const SampledFunction& sampled_function(uint32_t function) { return *g_functions[function]; }

StackTree::StackTree() {
  for (uint32_t i = 1; i < g_call_count.load(); ++i) d_calls.put(key_of(g_calls[i]), i);
  for (uint32_t i = 1; i < g_function_count.load(); ++i)
    d_functions.emplace(text_of(g_functions[i]->file, g_functions[i]->name), i);
}

uint32_t StackTree::function(std::string_view file, std::string_view name) {
  std::string text = text_of(file, name);
  auto found = d_functions.find(text);
  if (found != d_functions.end()) return found->second;
  uint32_t number = g_function_count.load();
  if (number == kMostFunctions) return 0;
  d_functions.emplace(std::move(text), number);
  g_functions[number] = new SampledFunction{std::string(file), std::string(name)};
  g_function_count.store(number + 1, std::memory_order_release);
  return number;
}

uint32_t StackTree::call(uint32_t stack, uint32_t function, int line) {
  SampledCall call{stack, function, std::clamp(line, 0, kMostLine)};
  uint64_t key = key_of(call);
  if (const uint32_t* known = d_calls.find(key)) return *known;
  uint32_t number = g_call_count.load();
  if (number == kMostCalls) return stack;
  d_calls.put(key, number);
  g_calls[number] = call;
  g_call_count.store(number + 1, std::memory_order_release);
  return number;
}

bool KnownCodes::learn(uintptr_t address, StackTree* tree, Code* out) const {
  CodeHead head{}, later{};
  TextCopy file, name;
  if (!copy_code(address, &head) || !copy_string(head.file, &file) || !copy_string(head.name, &name)) return false;
  std::vector<LineRange> lines = copy_lines(head);
  if (!copy_code(address, &later) || !(head == later)) return false;
  // What the interpreter itself puts between a class and its __init__ has its name for a file.
  bool is_own = file.view().substr(0, d_own.size()) == d_own, is_none = head.file == head.name;
  out->function = is_own || is_none ? 0 : tree->function(file.view(), name.view());
  out->has_no_room = out->function == 0 && !is_own && !is_none;
  out->head = head;
  out->lines = std::move(lines);
  return true;
}

void KnownCodes::check_batch(const uintptr_t* addresses, uint32_t count, StackTree* tree) {
  char copied[kBatch][kMostOfCodeHead];
  Pieces pieces;
  for (uint32_t i = 0; i < count; ++i) pieces.add(addresses[i], copied[i], code_head_bytes());
  uint32_t done = pieces.copy();
  for (uint32_t i = 0; i < count; ++i) {
    CodeHead head{};
    Code& code = d_codes[addresses[i]];
    bool is_same = i < done && parse_code(copied[i], &head) && head == code.head;
    if (is_same || learn(addresses[i], tree, &code)) {
      code.seen = d_stack;
    } else {
      d_codes.erase(addresses[i]);
    }
  }
}

void KnownCodes::verify(const StackCopy& stack, StackTree* tree, const std::vector<CallCopy>& before) {
  size_t same = 0, most = std::min<size_t>(stack.count, before.size());
  while (same < most && stack.calls[stack.count - 1 - same] == before[before.size() - 1 - same]) ++same;
  uint32_t first_same = stack.count - static_cast<uint32_t>(same);
  uint64_t by_turn = same == 0 ? stack.count : first_same + d_stack % same;
  uintptr_t batch[kBatch];
  uint32_t count = 0;
  for (uint32_t i = 0; i < stack.count; ++i) {
    Code& code = d_codes[stack.calls[i].code];
    if (code.seen == d_stack || (i >= first_same && i != by_turn && code.seen != 0)) continue;
    code.seen = d_stack;
    batch[count++] = stack.calls[i].code;
    if (count < kBatch) continue;
    check_batch(batch, count, tree);
    count = 0;
  }
  check_batch(batch, count, tree);
}

uint32_t KnownCodes::stack_of(const StackCopy& stack, StackTree* tree, std::vector<CallCopy>* before) {
  if (d_codes.size() >= kMostCodes) d_codes.clear();
  ++d_stack;
  d_is_cut = false;
  verify(stack, tree, *before);
  before->assign(stack.calls, stack.calls + stack.count);
  uint32_t number = 0;
  for (uint32_t i = stack.count; i-- > 0;) {
    const CallCopy& call = stack.calls[i];
    auto found = d_codes.find(call.code);
    int64_t offset = offset_of(call);
    bool is_there =
        found != d_codes.end() && (found->second.head.instructions < 0 || offset < found->second.head.instructions);
    // The innermost call may be one that has only been made: it is not there yet.
    if (!is_there) return i == 0 && number != 0 ? number : kTorn;
    const Code& code = found->second;
    d_is_cut |= code.has_no_room;
    if (code.function == 0) continue;
    auto range = std::upper_bound(code.lines.begin(), code.lines.end(), offset,
                                  [](int64_t at, const LineRange& lines) { return at < lines.end; });
    int line = code.lines.empty() || offset < 0 ? code.head.first_line
               : range == code.lines.end()      ? code.lines.back().line
                                                : range->line;
    uint32_t around = number;
    number = tree->call(around, code.function, line);
    d_is_cut |= number == around;
  }
  return number;
}

}  // namespace otp_python
