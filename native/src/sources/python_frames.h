// The names of Python's frames and of C functions, as torch's tracer has them, each worked out once.
//
// Python's lock is held in all of this.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_FRAMES_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_FRAMES_H_

#include <deque>
#include <string>
#include <unordered_map>

#include "python_source.h"

namespace otp_python {

// From addresses to something, for look-ups that take a nanosecond or two: no address is ever removed.
template <typename Value>
class AddressTable {
 public:
  Value* find(const void* address) const {
    for (size_t at = slot_of(address);; at = (at + 1) & d_mask) {
      const Slot& slot = d_slots[at];
      if (slot.address == address) return slot.value;
      if (slot.address == nullptr) return nullptr;
    }
  }
  void add(const void* address, Value* value) {
    if (2 * ++d_size > d_slots.size()) grow();
    put(address, value);
  }

 private:
  struct Slot {
    const void* address = nullptr;
    Value* value = nullptr;
  };

  // The upper bits of a product: the addresses are alike in their lower ones.
  size_t slot_of(const void* address) const {
    return static_cast<size_t>(reinterpret_cast<uintptr_t>(address) * 0x9E3779B97F4A7C15u >> 32) & d_mask;
  }
  void put(const void* address, Value* value) {
    size_t at = slot_of(address);
    while (d_slots[at].address != nullptr) at = (at + 1) & d_mask;
    d_slots[at] = {address, value};
  }
  void grow() {
    std::vector<Slot> before(2 * d_slots.size());
    before.swap(d_slots);
    d_mask = d_slots.size() - 1;
    for (const Slot& slot : before)
      if (slot.address != nullptr) put(slot.address, slot.value);
  }

  std::vector<Slot> d_slots = std::vector<Slot>(256);
  size_t d_mask = 255;
  size_t d_size = 0;
};

struct Code {
  PyObject* object;     // owned, so that no other one can come to have its address
  uint32_t number;      // among the codes
  uint32_t name;        // of a call of it, where that is always the same; 0: not known
  bool is_own;          // of this package: its frames are left out
  bool is_closed;       // and so is what it calls, none of which is the program's
  bool is_suspended;    // it can go on where it has stopped (a generator), and then has that line
  bool is_module_call;  // torch.nn.Module.__call__: named after the module
};

// What a tracer is told of the program when it begins.
struct Naming {
  PyObject* prefixes = nullptr;     // tuple of str: what paths lose at their beginning; the first that fits
  PyObject* own = nullptr;          // str: the directory of this package
  PyObject* open = nullptr;         // tuple of str: files there that call functions of the program
  PyObject* module_call = nullptr;  // code of torch.nn.Module.__call__, or None
};

class FrameNames {
 public:
  // Owns what is named in `naming`.
  explicit FrameNames(const Naming& naming) : d_naming(naming) {}
  // Releases what was kept, which may run any code.
  ~FrameNames();
  FrameNames(const FrameNames&) = delete;
  FrameNames& operator=(const FrameNames&) = delete;

  Code& code_of(PyFrameObject* frame) {
    PyObject* object = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
    Code* code = d_codes.find(object);
    if (__builtin_expect(code == nullptr, 0)) code = add_code(object);
    Py_DECREF(object);
    return *code;
  }

  // The name's id, where the frame has just been entered, ...
  uint32_t of_call(PyFrameObject* frame, Code& code) {
    return __builtin_expect(code.name != 0, 1) ? code.name : of_new_call(frame, code);
  }
  // ... and where it is somewhere in the middle.
  uint32_t of_running(PyFrameObject* frame, Code& code);
  // Of a builtin_function_or_method; 0 where it is this package's, and is left out.
  uint32_t of_function(PyObject* function) {
    const uint32_t* name = d_functions.find(definition_of(function));
    return __builtin_expect(name != nullptr, 1) ? *name : add_function(function);
  }

  // Finds out where a builtin_function_or_method has its definition. False, without an exception, where that fails.
  static bool find_fields();

 private:
  struct Module {
    PyObject* reference;  // weak where it can be; owned
    bool is_weak;
    uint32_t name;
  };

  static const void* definition_of(PyObject* function);
  Code* add_code(PyObject* object);
  uint32_t add_function(PyObject* function);
  uint32_t of_new_call(PyFrameObject* frame, Code& code);
  uint32_t at_line(const Code& code, int line);
  uint32_t of_module(PyFrameObject* frame);
  uint32_t add_module(PyObject* module);
  PyObject* shortened(PyObject* path);

  Naming d_naming;
  AddressTable<Code> d_codes;
  std::deque<Code> d_all_codes;
  std::unordered_map<uint64_t, uint32_t> d_lines;  // by a code's number and the line
  AddressTable<uint32_t> d_functions;
  std::deque<uint32_t> d_function_names;
  std::unordered_map<const void*, Module> d_modules;
  std::unordered_map<PyObject*, uint32_t> d_instances;  // of each class, so far
  std::vector<PyObject*> d_kept;                        // owned
};

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_FRAMES_H_
