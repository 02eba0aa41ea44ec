#include "stack_layout.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

namespace otp_python {

namespace {

constexpr int kMostOfThread = 60 * kWord, kMostOfCode = 31 * kWord, kMostOfPthread = 4096;  // that are looked at
constexpr int kMostOfInterpreter = 1 << 17;
constexpr int kFrameOfObject = 3 * kWord;  // since Python 3.11
constexpr long kSeparateFrames = 0x030B0000;

struct FrameFields {
  long since;
  int code, caller, instruction, owner;
};
constexpr FrameFields kFrames[] = {
    {0x030A0000, 32, 24, 96, kNone},
    {kSeparateFrames, 32, 48, 56, 69},
    {0x030C0000, 0, 8, 56, 70},
    {0x030E0000, 0, 8, 56, 74},
};

uintptr_t address_of(const void* object) { return reinterpret_cast<uintptr_t>(object); }

template <typename T>
bool holds(uintptr_t object, int at, T value) {
  T found;
  return copy_memory(object + static_cast<uintptr_t>(at), &found, sizeof found) && found == value;
}

// The first place in so many bytes where the value is; kNone: nowhere.
template <typename T>
int find_value(uintptr_t object, int bytes, T value) {
  for (int at = 0; at < bytes; at += static_cast<int>(sizeof value))
    if (holds(object, at, value)) return at;
  return kNone;
}

// Of an attribute that the object keeps a pointer to.
int find_attribute(PyObject* object, const char* name) {
  PyObject* value = PyObject_GetAttrString(object, name);
  int at = value == nullptr ? kNone : find_value(address_of(object), kMostOfCode, address_of(value));
  Py_XDECREF(value);
  return at;
}

long number_attribute(PyObject* object, const char* name) {
  PyObject* value = PyObject_GetAttrString(object, name);
  long number = value == nullptr ? kNone : PyLong_AsLong(value);
  Py_XDECREF(value);
  return number;
}

bool find_innermost(uintptr_t frame, StackLayout* found) {
  uintptr_t thread = address_of(PyThreadState_Get());
  for (int at = 0; at < kMostOfThread; at += kWord) {
    uintptr_t holder = 0;
    if (!copy_memory(thread + static_cast<uintptr_t>(at), &holder, sizeof holder)) return false;
    int in_holder = holder == frame ? kNone : find_value(holder, 2 * kWord, frame);
    if (holder != frame && in_holder == kNone) continue;
    found->thread_frame = at;
    found->thread_frame_holder = in_holder;
    return true;
  }
  return false;
}

bool find_ids(StackLayout* found) {
  uintptr_t thread = address_of(PyThreadState_Get()), ident = PyThread_get_thread_ident();
  auto os_tid = static_cast<uint32_t>(syscall(SYS_gettid));
  found->thread_ident = find_value(thread, kMostOfThread, ident);
  if (found->thread_ident == kNone) return false;
  if (holds(thread, found->thread_ident + kWord, uint64_t{os_tid})) {
    found->thread_tid = found->thread_ident + kWord;
    return true;
  }
  found->pthread_tid = find_value(ident, kMostOfPthread, os_tid);  // up to Python 3.10, only pthread_t has it
  return found->pthread_tid != kNone;
}

// A new thread comes first in the interpreter's list: of its words, the one that is this one's address now. In few
// calls, since a native thread may come in between that needs no lock for it.
int find_newest(uintptr_t interpreter, PyThreadState* newest) {
  uintptr_t words[512];
  constexpr int kBytes = sizeof words;
  for (int at = 0; at < kMostOfInterpreter; at += kBytes) {
    if (!copy_memory(interpreter + static_cast<uintptr_t>(at), words, sizeof words)) return kNone;
    const uintptr_t* found = std::find(std::begin(words), std::end(words), address_of(newest));
    if (found != std::end(words)) return at + static_cast<int>(found - words) * kWord;
  }
  return kNone;
}

bool find_first_thread(StackLayout* found) {
  constexpr int kAttempts = 3;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    PyThreadState* newest = PyThreadState_New(PyInterpreterState_Get());
    if (newest == nullptr) return false;
    int at = find_newest(found->interpreter, newest);
    bool is_known = at != kNone && holds(address_of(newest), 2 * kWord, found->interpreter);
    PyThreadState_Clear(newest);
    PyThreadState_Delete(newest);
    found->first_thread = at;
    if (is_known && !holds(found->interpreter, at, address_of(newest))) return true;
  }
  return false;
}

bool find_code(PyObject* code, PyObject* marked, StackLayout* found) {
  found->code_type = address_of(Py_TYPE(code));
  found->code_file = find_attribute(code, "co_filename");
  found->code_name = find_attribute(code, "co_name");
  found->code_lines = find_attribute(code, "co_linetable");
  auto line = static_cast<int>(number_attribute(marked, "co_firstlineno"));
  found->code_first_line = find_value(address_of(marked), kMostOfCode, line);
  return std::min({found->code_file, found->code_name, found->code_lines, found->code_first_line}) > 0;
}

// By a text of ASCII that is at hand: its flags as in copy_string(), and where its characters are.
bool find_text(PyObject* code, StackLayout* found) {
  constexpr uint32_t kCompactAscii = 1 | 8 | 16;
  constexpr int kFlagsAt = 4 * kWord;
  found->text_type = address_of(&PyUnicode_Type);
  found->bytes_type = address_of(&PyBytes_Type);
  PyObject* name = PyObject_GetAttrString(code, "co_name");
  Py_ssize_t size = 0;
  const char* characters = name == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name, &size);
  uint32_t flags = 0;
  if (characters != nullptr && copy_memory(address_of(name) + kFlagsAt, &flags, sizeof flags)) {
    for (int shift : {2, 8, 16})
      if ((flags >> shift & 31) == kCompactAscii) found->text_flags_shift = shift;
    found->text_head = static_cast<int>(characters - reinterpret_cast<const char*>(name));
  }
  Py_XDECREF(name);
  bool is_known = found->text_head == 5 * kWord || found->text_head == 6 * kWord;  // since Python 3.12, and before
  return is_known && found->text_flags_shift != kNone;
}

// Where a code has its instructions: the frame points to the one at f_lasti.
bool find_instructions(uintptr_t frame, PyObject* object, PyObject* code, StackLayout* found) {
  uintptr_t instruction = 0;
  uintptr_t at = frame + static_cast<uintptr_t>(found->frame_instruction);
  if (!copy_memory(at, &instruction, sizeof instruction)) return false;
  auto distance = static_cast<int64_t>(instruction - address_of(code)) - number_attribute(object, "f_lasti");
  found->code_instructions = static_cast<int>(distance);
  return distance > 0 && distance < 2 * kMostOfCode;
}

bool find_all(PyObject* object, PyObject* code, PyObject* marked, StackLayout* found) {
  PyObject* number = PySys_GetObject("hexversion");
  long version = number == nullptr ? 0 : PyLong_AsLong(number);
  auto is_later = [version](const FrameFields& fields) { return fields.since > version; };
  const FrameFields* next = std::find_if(std::begin(kFrames), std::end(kFrames), is_later);
  if (next == std::begin(kFrames)) return false;
  const FrameFields& fields = next[-1];
  bool is_separate = fields.since >= kSeparateFrames;
  uintptr_t frame = address_of(object);
  if (is_separate && !copy_memory(frame + kFrameOfObject, &frame, sizeof frame)) return false;
  found->frame_code = fields.code;
  found->frame_caller = fields.caller;
  found->frame_instruction = fields.instruction;
  found->frame_owner = fields.owner;
  found->interpreter = address_of(PyInterpreterState_Get());
  return find_innermost(frame, found) && find_ids(found) && find_first_thread(found) &&
         find_code(code, marked, found) && find_text(code, found) &&
         (!is_separate || find_instructions(frame, object, code, found));
}

}  // namespace

PyObject* find_stack_layout(PyObject* frame, PyObject* marked) {
  if (g_stack_layout.interpreter != 0) Py_RETURN_NONE;  // threads may read with it
  uintptr_t type = 0;
  if (!copy_memory(address_of(frame) + kWord, &type, sizeof type))
    return PyUnicode_FromFormat("the system does not permit process_vm_readv: %s", std::strerror(errno));
  PyObject* code = PyObject_GetAttrString(frame, "f_code");
  if (code == nullptr) return nullptr;
  StackLayout found;
  bool all = find_all(frame, code, marked, &found);
  Py_DECREF(code);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (!all) return PyUnicode_FromString("this interpreter's frames are not where they are known to be");
  g_stack_layout = found;
  Py_RETURN_NONE;
}

}  // namespace otp_python
