// The names of Python's frames and of C functions, as torch's tracer has them, each worked out once.
//
// Python's lock is held in all of this.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_FRAME_NAMES_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_FRAME_NAMES_H_

#include <array>
#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>

#include "number_table.h"
#include "source.h"

namespace otp_python {

struct Code {
  PyObject* object;     // owned, so that no other one can come to have its address
  PyObject* module;     // name of the module that it is of, or null; owned
  uint32_t number;      // among the codes
  uint32_t name;        // of a call of it, where that is always the same; 0: not known
  uint32_t not_for;     // sessions that leave its calls out
  int start;            // of a code that can be suspended: f_lasti is not above this when it begins
  bool is_usual;        // a call of it is its name, and nothing else has to be known: what is below is false
  bool is_own;          // of this package: its frames are left out
  bool is_closed;       // and so is what it calls, none of which is the program's
  bool is_suspended;    // it can continue where it has stopped (a generator), and then has that line
  bool is_module_call;  // torch.nn.Module.__call__: named after the module
  bool is_quiet;        // what it calls is left out: it compiles, and that is no part of the program
  bool is_step;         // torch.optim.Optimizer._optimizer_step_code, which each step of an optimizer calls
};

// What a tracer knows of the program when it begins. Owned by FrameNames.
struct Naming {
  PyObject* prefixes = nullptr;     // tuple of str: what paths lose at their beginning; the first that fits
  PyObject* own = nullptr;          // str: the directory of this package
  PyObject* open = nullptr;         // tuple of str: files there that call functions of the program
  PyObject* module_call = nullptr;  // code of torch.nn.Module.__call__, or None
  PyObject* step = nullptr;         // code of torch.optim.Optimizer._optimizer_step_code, or None
  PyObject* quiet = nullptr;        // tuple of str: functions, with their modules, of which no calls are shown
  PyObject* book = nullptr;         // is called with what is met for the first time, or None
  int return_generator = -1;        // the opcode with which generators begin; -1: there is none (Python 3.10)

  std::array<PyObject*, 7> objects() const { return {prefixes, own, open, module_call, step, quiet, book}; }
};

class FrameNames {
 public:
  explicit FrameNames(const Naming& naming);
  // Releases what was kept, which may run any code.
  ~FrameNames();
  FrameNames(const FrameNames&) = delete;
  FrameNames& operator=(const FrameNames&) = delete;

  // Null where it is not known yet.
  Code* find(PyObject* object) const {
    Code* const* code = d_codes.find(object);
    return __builtin_expect(code != nullptr, 1) ? *code : nullptr;
  }
  // Finds or adds it. `frame` runs it, or is null where the innermost frame of this thread does.
  Code& code_of(PyObject* object, PyFrameObject* frame);
  // Asks again which sessions leave out what is known so far.
  void decide_again(uint32_t session);

  // The name's id, where the code has just been entered, ...
  uint32_t of_call(Code& code, PyFrameObject* frame);
  // ... and where it is at that line.
  uint32_t of_running(Code& code, PyFrameObject* frame, int line);
  // Of a code that can be suspended, where it begins or continues at that instruction; 0: not known yet.
  uint32_t find_place(const Code& code, long instruction) const {
    const uint32_t* name = d_places.find(place_key(code, instruction));
    return name == nullptr ? 0 : *name;
  }
  void keep_place(const Code& code, long instruction, PyFrameObject* frame);
  // The number of the generator or coroutine whose frame this is; `is_new`: it begins.
  uint32_t of_generator(const void* frame, bool is_new) {
    const uint32_t* known = is_new ? nullptr : d_generators.find(frame);
    if (known != nullptr && *known != 0) return *known;
    d_generators.put(frame, ++d_last_identity);
    return d_last_identity;
  }
  // One begins in that frame of which nothing is kept: the number of the one before is not its own.
  void forget_generator(const void* frame) {
    if (d_generators.find(frame) != nullptr) d_generators.put(frame, 0);
  }
  // The number of the optimizer whose step's frame this is.
  uint32_t of_optimizer(PyFrameObject* frame);
  // Of a builtin_function_or_method; 0 where it is not known yet ...
  uint32_t find_function(PyObject* function) const {
    const uint32_t* name = d_functions.find(definition_of(function));
    return __builtin_expect(name != nullptr, 1) ? *name : 0;
  }
  // (as that whose definition it is), ...
  uint32_t find_definition(const void* definition) const {
    const uint32_t* name = d_functions.find(definition);
    return name == nullptr ? 0 : *name;
  }
  // ... or is this package's, and is left out.
  uint32_t of_function(PyObject* function) {
    const uint32_t* name = d_functions.find(definition_of(function));
    return name != nullptr ? *name : add_function(function);
  }

  const Naming& naming() const { return d_naming; }

  // Finds out where a builtin_function_or_method has its definition. False, without an exception, where that fails.
  static bool find_fields();

  // A function of a session, asked with a code and the name of its module whether its calls are requested; or null.
  PyObject* decide[OTP_MAX_SESSIONS] = {};
  uint32_t modules_only = 0;  // sessions that request calls of modules, and steps of optimizers, and no others

 private:
  // Objects that are told apart by what they are, and kept only where no weak reference to them can be.
  struct Instance {
    PyObject* reference;  // owned
    bool is_weak;
    uint32_t value;

    bool is(PyObject* object) const { return !is_weak || PyWeakref_GetObject(reference) == object; }
  };
  using Instances = std::unordered_map<const void*, Instance>;

  static const void* definition_of(PyObject* function) {
    const void* definition;
    std::memcpy(&definition, reinterpret_cast<const char*>(function) + s_definition_at, sizeof definition);
    return definition;
  }
  static const uint32_t* find_instance(const Instances& instances, PyObject* object);
  static void keep_instance(Instances* instances, PyObject* object, uint32_t value);
  static uint64_t place_key(const Code& code, long at) {
    return (static_cast<uint64_t>(code.number) + 1) << 32 | static_cast<uint32_t>(at);
  }
  Code* add_code(PyObject* object, PyFrameObject* frame);
  void decide_for(Code& code, uint32_t sessions);
  uint32_t add_function(PyObject* function);
  uint32_t at_line(const Code& code, int line);
  uint32_t of_module(PyFrameObject* frame);
  uint32_t add_module(PyObject* module);
  PyObject* shortened(PyObject* path);
  // Of what it raises nobody hears. With `more` all three are given as one tuple.
  void tell(const char* method, uint32_t number, PyObject* object, PyObject* more = nullptr);

  static size_t
      s_definition_at;  // in bytes, of a builtin_function_or_method: no part of the stable ABI, so it is looked for

  Naming d_naming;
  NumberTable<Code*> d_codes;
  std::deque<Code> d_all_codes;
  NumberTable<uint32_t> d_lines;   // by a code's number and the line
  NumberTable<uint32_t> d_places;  // by that and the instruction
  NumberTable<uint32_t> d_functions;
  Instances d_modules;
  Instances d_optimizers;
  std::unordered_map<PyObject*, uint32_t> d_instances;  // of each class, so far
  NumberTable<uint32_t> d_generators;                   // by frame; written over, so as many as there ever were at once
  uint32_t d_last_identity = 0;
  std::vector<PyObject*> d_kept;  // owned
};

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_FRAME_NAMES_H_
