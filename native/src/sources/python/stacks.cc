// The stacks of Python's threads as text, for the hang watch: from any thread, without Python's lock.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string_view>

#include "code_reader.h"
#include "stack_layout.h"
#include "thread_list.h"

namespace otp_python {

namespace {

constexpr int kAttempts = 4;
constexpr uint32_t kCallsOfHanging = 64, kCallsOfOthers = 20;  // that are written, the innermost ones

// Whole lines, as far as they fit.
class Lines {
 public:
  Lines(char* text, uint32_t bytes) : d_text(text), d_left(bytes) {}

  void add(std::string_view line) {
    if (line.size() + 1 > d_left) {
      d_left = 0;
      return;
    }
    std::memcpy(d_text + d_size, line.data(), line.size());
    d_text[d_size + line.size()] = '\n';
    d_size += static_cast<uint32_t>(line.size() + 1);
    d_left -= static_cast<uint32_t>(line.size() + 1);
  }
  bool is_full() const { return d_left == 0; }
  uint32_t size() const { return d_size; }

 private:
  char* d_text;
  uint32_t d_left, d_size = 0;
};

void write_call(const CallText& text, Lines* lines) {
  char line[2 * sizeof text.file.data + 64];
  int size = std::snprintf(line, sizeof line, "  File \"%.*s\", line %d in %.*s", static_cast<int>(text.file.size),
                           text.file.data, text.line, static_cast<int>(text.name.size), text.name.data);
  lines->add({line, static_cast<size_t>(size)});
}

// Whole if that is possible in a few attempts. False where the thread runs no Python.
bool copy_stack(const PythonThreadCopy& thread, StackReader* reader, StackCopy* out) {
  using Found = StackReader::Found;
  StackHints hints;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    Found found = reader->read(thread.state, thread.ident, &hints, out);
    if (found == Found::kNoPython) return false;
    if (found == Found::kTorn) out->count = 0;
    if (out->is_whole) break;
  }
  return true;
}

// Nothing of a thread that runs no Python.
void write_thread(const PythonThreadCopy& thread, uint32_t most, StackReader* reader, Lines* lines) {
  StackCopy stack;
  if (!copy_stack(thread, reader, &stack)) return;
  char head[64];
  int size = std::snprintf(head, sizeof head, "Thread %u (most recent call first):", thread.os_tid);
  lines->add({head, static_cast<size_t>(size)});
  if (!stack.is_whole) lines->add("  (its latest calls changed while they were read)");
  bool was_gone = false;
  for (uint32_t i = 0; i < stack.count && i < most && !lines->is_full(); ++i) {
    CallText text;
    bool is_gone = !copy_text(stack.calls[i], &text);
    if (!is_gone) write_call(text, lines);
    if (is_gone && !was_gone) lines->add("  (calls that ended meanwhile)");
    was_gone = is_gone;
  }
  if (stack.count > most || stack.is_cut) lines->add("  ...");
}

// As otp_hang_watch_start wants it. The thread that hangs comes first, then the main thread, then the latest.
uint32_t write_stacks(uint32_t hanging, char* text, uint32_t bytes) {
  StackReader reader;
  Lines lines(text, bytes);
  auto main = static_cast<uint32_t>(getpid());
  PythonThreadCopy thread{};
  if (copy_thread_of(hanging, &thread)) write_thread(thread, kCallsOfHanging, &reader, &lines);
  if (main != hanging && copy_thread_of(main, &thread)) write_thread(thread, kCallsOfHanging, &reader, &lines);
  bool found = copy_first_thread(&thread);
  for (uint32_t i = 0; found && i < kMostThreads && !lines.is_full(); ++i, found = copy_next_thread(&thread))
    if (thread.os_tid != hanging && thread.os_tid != main) write_thread(thread, kCallsOfOthers, &reader, &lines);
  if (!found && thread.next != 0) lines.add("(other threads are missing: one of them ended meanwhile)");
  return lines.size();
}

// find_stacks(frame, marked) -> str | None; see _python.pyi.
PyObject* find_stacks(PyObject*, PyObject* arguments) {
  PyObject *frame = nullptr, *marked = nullptr;
  if (PyArg_ParseTuple(arguments, "OO:find_stacks", &frame, &marked) == 0) return nullptr;
  return find_stack_layout(frame, marked);
}

// read_stack(os_tid) -> list of (file, line, function), the innermost call first.
PyObject* read_stack(PyObject*, PyObject* number) {
  unsigned long os_tid = PyLong_AsUnsignedLong(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  PyObject* calls = PyList_New(0);
  PythonThreadCopy thread{};
  if (calls == nullptr || !copy_thread_of(static_cast<uint32_t>(os_tid), &thread)) return calls;
  StackCopy stack;
  static StackReader reader;  // with Python's lock
  if (!copy_stack(thread, &reader, &stack)) return calls;
  for (uint32_t i = 0; i < stack.count; ++i) {
    CallText text;
    if (!copy_text(stack.calls[i], &text)) continue;
    PyObject* call = Py_BuildValue("(s#is#)", text.file.data, Py_ssize_t{text.file.size}, text.line, text.name.data,
                                   Py_ssize_t{text.name.size});
    bool added = call != nullptr && PyList_Append(calls, call) == 0;
    Py_XDECREF(call);
    if (added) continue;
    Py_DECREF(calls);
    return nullptr;
  }
  return calls;
}

// stacks_writer() -> int: address of write_stacks.
PyObject* stacks_writer(PyObject*, PyObject*) { return PyLong_FromVoidPtr(reinterpret_cast<void*>(write_stacks)); }

PyMethodDef g_methods[] = {{"find_stacks", find_stacks, METH_VARARGS, nullptr},
                           {"read_stack", read_stack, METH_O, nullptr},
                           {"stacks_writer", stacks_writer, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

int add_stacks(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
