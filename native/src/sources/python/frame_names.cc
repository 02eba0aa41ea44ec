// Names are worked out once and are numbers from then on. What a name is found by is an address, so what has that
// address is kept alive as long as the tracer runs, or is only believed where a weak reference still leads to it.
#include <unistd.h>

#include <cstring>

#include "frame_names.h"
#include "profile_function.h"

namespace otp_python {

namespace {

constexpr long kGenerator = 0x20, kCoroutine = 0x80, kAsyncGenerator = 0x200;  // of co_flags
constexpr int kMostWords = 6;  // of a builtin_function_or_method that are looked at: it has as many at least

const void* word(const PyObject* object, int at) {
  const void* value;
  std::memcpy(&value, reinterpret_cast<const char*>(object) + static_cast<size_t>(at) * sizeof value, sizeof value);
  return value;
}

PyObject* nothing(PyObject*, PyObject*) { Py_RETURN_NONE; }

PyMethodDef g_probe = {"probe", nothing, METH_NOARGS, nullptr};

uint32_t unknown_name() {
  PyErr_Clear();
  return g_api->intern("(unknown)", UINT32_MAX, OTP_NAME_CODE);
}

// The id of a str that is released; where it is null, of what stands for names that cannot be had.
uint32_t interned(PyObject* text) {
  Py_ssize_t size = 0;
  PyObject* owner = nullptr;
  const char* data = text == nullptr ? nullptr : utf8(text, &size, &owner);
  uint32_t id = data == nullptr ? unknown_name() : g_api->intern(data, static_cast<uint32_t>(size), OTP_NAME_CODE);
  Py_XDECREF(owner);
  Py_XDECREF(text);
  return id;
}

bool starts_with(PyObject* text, PyObject* prefix) {
  return PyUnicode_Tailmatch(text, prefix, 0, PY_SSIZE_T_MAX, -1) == 1;
}

// Whether the function is one of this package: of a module of it, or a method of a class of it.
bool is_own(PyObject* self) {
  PyObject* owner = PyModule_Check(self) ? self : reinterpret_cast<PyObject*>(Py_TYPE(self));
  PyObject* name = PyObject_GetAttrString(owner, PyModule_Check(self) ? "__name__" : "__module__");
  PyObject* package = PyUnicode_FromString("otel_torchprof.");
  bool own = name != nullptr && package != nullptr && PyUnicode_Check(name) && starts_with(name, package);
  Py_XDECREF(package);
  Py_XDECREF(name);
  PyErr_Clear();
  return own;
}

long flags_of(PyObject* code) {
  PyObject* flags = PyObject_GetAttrString(code, "co_flags");
  long value = flags == nullptr ? 0 : PyLong_AsLong(flags);
  Py_XDECREF(flags);
  PyErr_Clear();
  return value;
}

// Whether a class of the object has the function as its method: then the class has the definition too.
bool is_method_of_class(PyObject* object, PyObject* function) {
  PyObject* name = PyObject_GetAttrString(function, "__name__");
  PyObject* bases = PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__mro__");
  bool found = false;
  for (Py_ssize_t i = 0; name != nullptr && bases != nullptr && !found && i < PyTuple_Size(bases); ++i) {
    PyObject* members = PyObject_GetAttrString(PyTuple_GetItem(bases, i), "__dict__");
    PyObject* member = members == nullptr ? nullptr : PyObject_GetItem(members, name);
    PyErr_Clear();
    found = member != nullptr && PyObject_TypeCheck(member, &PyMethodDescr_Type) != 0;
    Py_XDECREF(member);
    Py_XDECREF(members);
  }
  Py_XDECREF(bases);
  Py_XDECREF(name);
  return found;
}

// What a frame has as `self`; null, maybe with an exception set, where it has none.
PyObject* self_of(PyFrameObject* frame) {
  if (g_variable_of != nullptr) return g_variable_of(frame, "self");
  PyObject* locals = PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_locals");
  PyObject* self = locals == nullptr ? nullptr : PyMapping_GetItemString(locals, "self");
  Py_XDECREF(locals);
  return self;
}

// Name of the module in which a frame's code is, or null. Of the innermost frame of this thread, where it is null.
PyObject* module_name(PyFrameObject* frame) {
  PyObject* globals;
  if (frame == nullptr) {
    globals = PyEval_GetGlobals();
    Py_XINCREF(globals);
  } else {
    globals = PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_globals");
  }
  PyObject* name = globals == nullptr ? nullptr : PyMapping_GetItemString(globals, "__name__");
  Py_XDECREF(globals);
  PyErr_Clear();
  if (name == nullptr || PyUnicode_Check(name)) return name;
  Py_DECREF(name);
  return nullptr;
}

// Whether a function of a module is among those that are named `module.function`.
bool is_among(PyObject* names, PyObject* module, PyObject* code) {
  PyObject* function = PyObject_GetAttrString(code, "co_name");
  PyObject* name = function == nullptr ? nullptr : PyUnicode_FromFormat("%U.%U", module, function);
  bool found = name != nullptr && PySequence_Contains(names, name) == 1;
  Py_XDECREF(name);
  Py_XDECREF(function);
  PyErr_Clear();
  return found;
}

// Where a code that makes a generator stands when that begins to run; -1: before its first instruction. The instruction
// that makes it is followed by one that drops what it is sent and by the one at which calls are reported.
int start_of(PyObject* code, int return_generator) {
  PyObject* bytes = return_generator < 0 ? nullptr : PyObject_GetAttrString(code, "co_code");
  char* data = nullptr;
  Py_ssize_t size = 0;
  int found = -1;
  if (bytes != nullptr && PyBytes_AsStringAndSize(bytes, &data, &size) == 0)
    for (Py_ssize_t at = 0; found < 0 && at < size; at += 2)
      if (static_cast<unsigned char>(data[at]) == return_generator) found = static_cast<int>(at) + 4;
  Py_XDECREF(bytes);
  PyErr_Clear();
  return found;
}

// By the repr up to the address: of a method of an instance, the address is that of the first one that was seen. A
// program that is profiled again and again must not have a new name for it each time.
uint32_t name_without_address(PyObject* text) {
  static std::unordered_map<std::string, uint32_t> known;
  static pid_t process = getpid();
  if (process != getpid()) known.clear();  // in a forked child the recorder has another table of names
  process = getpid();
  const char* data = PyUnicode_AsUTF8AndSize(text, nullptr);
  if (data == nullptr) return interned(text);
  const char* address = std::strstr(data, " at 0x");
  std::string key(data, address == nullptr ? std::strlen(data) : static_cast<size_t>(address - data));
  auto found = known.find(key);
  if (found == known.end()) return known[key] = interned(text);
  Py_DECREF(text);
  return found->second;
}

}  // namespace

size_t FrameNames::s_definition_at = 0;

bool FrameNames::find_fields() {
  Unraising guard;
  PyObject* function = PyCFunction_New(&g_probe, Py_None);
  bool found = false;
  for (int at = 0; function != nullptr && !found && at < kMostWords; ++at) {
    found = word(function, at) == &g_probe;
    if (found) s_definition_at = static_cast<size_t>(at) * sizeof(void*);
  }
  Py_XDECREF(function);
  return found;
}

FrameNames::FrameNames(const Naming& naming) : d_naming(naming) {
  for (PyObject* object : naming.objects()) Py_INCREF(object);
}

FrameNames::~FrameNames() {
  for (const Code& code : d_all_codes) {
    Py_DECREF(code.object);
    Py_XDECREF(code.module);
  }
  for (const Instances* instances : {&d_modules, &d_optimizers})
    for (const auto& [address, instance] : *instances) Py_DECREF(instance.reference);
  for (PyObject* object : d_kept) Py_DECREF(object);
  for (PyObject* object : decide) Py_XDECREF(object);
  for (PyObject* object : d_naming.objects()) Py_DECREF(object);
}

void FrameNames::tell(const char* method, uint32_t number, PyObject* object, PyObject* more) {
  if (d_naming.book == Py_None) return;
  PyObject* told = more == nullptr ? PyObject_CallMethod(d_naming.book, method, "IO", number, object)
                                   : PyObject_CallMethod(d_naming.book, method, "((IOO))", number, object, more);
  Py_XDECREF(told);
  forget_error();
}

Code& FrameNames::code_of(PyObject* object, PyFrameObject* frame) {
  Code* code = find(object);
  return code != nullptr ? *code : *add_code(object, frame);
}

Code* FrameNames::add_code(PyObject* object, PyFrameObject* frame) {
  Unraising guard;
  PyObject* path = PyObject_GetAttrString(object, "co_filename");
  bool own = path != nullptr && starts_with(path, d_naming.own);
  bool closed = own && PySequence_Contains(d_naming.open, path) == 0;
  Py_XDECREF(path);
  bool suspended = (flags_of(object) & (kGenerator | kCoroutine | kAsyncGenerator)) != 0;
  PyObject* module = module_name(frame);
  if (Code* code = find(object)) {  // looking for all that has run code that came here
    Py_XDECREF(module);
    return code;
  }
  auto number = static_cast<uint32_t>(d_all_codes.size());
  bool quiet = module != nullptr && is_among(d_naming.quiet, module, object);
  Code* code = &d_all_codes.emplace_back(Code{object, module, number, 0, 0, -1, false, own, closed, suspended,
                                              object == d_naming.module_call, quiet, object == d_naming.step});
  Py_INCREF(object);
  d_codes.put(object, code);
  if (suspended) code->start = start_of(object, d_naming.return_generator);
  if (!own) decide_for(*code, active_sessions(0));
  return code;
}

// Calls of modules and steps of optimizers are no function's of a file: nobody is asked about them.
void FrameNames::decide_for(Code& code, uint32_t sessions) {
  for (uint32_t rest = sessions; rest != 0; rest &= rest - 1) {
    int bit = __builtin_ctz(rest);
    uint32_t session = 1u << bit;
    bool of_torch = code.is_module_call || code.is_step;
    bool requested = of_torch || (modules_only & session) == 0;
    if (requested && !of_torch && decide[bit] != nullptr) {
      PyObject* module = code.module == nullptr ? Py_None : code.module;
      PyObject* asked = decide[bit];
      Py_INCREF(asked);  // another session may take its place meanwhile
      PyObject* answer = PyObject_CallFunctionObjArgs(asked, code.object, module, nullptr);
      requested = answer != Py_False;
      Py_XDECREF(answer);
      Py_DECREF(asked);
      give_back_error();  // deciding raises nothing of its own: it is of a handler of a signal
    }
    code.not_for = requested ? code.not_for & ~session : code.not_for | session;
  }
}

void FrameNames::decide_again(uint32_t session) {
  Unraising guard;
  for (size_t i = 0; i < d_all_codes.size(); ++i)  // asking may add some
    if (!d_all_codes[i].is_own) decide_for(d_all_codes[i], session);
}

uint32_t FrameNames::of_call(Code& code, PyFrameObject* frame) {
  if (code.name != 0) return code.name;
  if (code.is_module_call) return of_module(frame);
  uint32_t name = at_line(code, PyFrame_GetLineNumber(frame));
  if (code.is_suspended) return name;
  code.name = name;
  code.is_usual = !code.is_step && !code.is_quiet && !code.is_own;
  return name;
}

uint32_t FrameNames::of_running(Code& code, PyFrameObject* frame, int line) {
  return code.is_module_call ? of_module(frame) : at_line(code, line);
}

void FrameNames::keep_place(const Code& code, long instruction, PyFrameObject* frame) {
  d_places.put(place_key(code, instruction), at_line(code, PyFrame_GetLineNumber(frame)));
}

uint32_t FrameNames::at_line(const Code& code, int line) {
  uint64_t key = place_key(code, line);
  if (const uint32_t* known = d_lines.find(key)) return *known;
  Unraising guard;
  PyObject* path = shortened(PyObject_GetAttrString(code.object, "co_filename"));
  PyObject* function = path == nullptr ? nullptr : PyObject_GetAttrString(code.object, "co_name");
  uint32_t name = interned(function == nullptr ? nullptr : PyUnicode_FromFormat("%U(%d): %U", path, line, function));
  Py_XDECREF(function);
  Py_XDECREF(path);
  tell("add_code", name, code.object, code.module == nullptr ? Py_None : code.module);
  d_lines.put(key, name);
  return name;
}

// Without what it has in common with sys.path and the like. Takes the path, gives a new reference.
PyObject* FrameNames::shortened(PyObject* path) {
  if (path == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_Size(d_naming.prefixes); ++i) {
    PyObject* prefix = PyTuple_GetItem(d_naming.prefixes, i);
    if (!starts_with(path, prefix)) continue;
    PyObject* rest = PyUnicode_Substring(path, PyUnicode_GetLength(prefix), PY_SSIZE_T_MAX);
    Py_DECREF(path);
    return rest;
  }
  return path;
}

uint32_t FrameNames::add_function(PyObject* function) {
  Unraising guard;
  PyObject* self = PyCFunction_GetSelf(function);
  bool of_class = self != nullptr && is_method_of_class(self, function);
  uint32_t name = 0;
  if (self == nullptr || !is_own(self)) {
    PyObject* text = PyObject_Repr(function);
    bool of_instance = text != nullptr && self != nullptr && !PyType_Check(self);
    name = of_instance ? name_without_address(text) : interned(text);
  }
  PyObject* kept = of_class ? reinterpret_cast<PyObject*>(Py_TYPE(self)) : function;
  d_kept.push_back(kept);
  Py_INCREF(kept);
  d_functions.put(definition_of(function), name);
  return name;
}

const uint32_t* FrameNames::find_instance(const Instances& instances, PyObject* object) {
  auto found = instances.find(object);
  return found != instances.end() && found->second.is(object) ? &found->second.value : nullptr;
}

void FrameNames::keep_instance(Instances* instances, PyObject* object, uint32_t value) {
  PyObject* reference = PyWeakref_NewRef(object, nullptr);
  bool weak = reference != nullptr;
  if (!weak) {
    PyErr_Clear();
    reference = object;
    Py_INCREF(object);
  }
  auto [entry, is_new] = instances->try_emplace(object, Instance{reference, weak, value});
  if (is_new) return;
  PyObject* before = entry->second.reference;
  entry->second = {reference, weak, value};
  Py_DECREF(before);
}

uint32_t FrameNames::of_module(PyFrameObject* frame) {
  Unraising guard;
  PyObject* module = self_of(frame);
  if (module == nullptr) return unknown_name();
  const uint32_t* known = find_instance(d_modules, module);
  uint32_t name = known != nullptr ? *known : add_module(module);
  Py_DECREF(module);
  return name;
}

// Classes are told apart by what they are, not by their names, and are kept.
uint32_t FrameNames::add_module(PyObject* module) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(module));
  auto [entry_of_type, is_new] = d_instances.try_emplace(type, 0);
  uint32_t& count = entry_of_type->second;  // stays where it is while other threads name modules
  if (is_new) {
    d_kept.push_back(type);
    Py_INCREF(type);
  }
  PyObject* class_name = PyObject_GetAttrString(type, "__name__");
  uint32_t number = count++;
  uint32_t name =
      interned(class_name == nullptr ? nullptr : PyUnicode_FromFormat("nn.Module: %U_%u", class_name, number));
  Py_XDECREF(class_name);
  keep_instance(&d_modules, module, name);
  tell("add_module", name, module);
  return name;
}

uint32_t FrameNames::of_optimizer(PyFrameObject* frame) {
  Unraising guard;
  PyObject* optimizer = self_of(frame);
  if (optimizer == nullptr) return 0;
  const uint32_t* known = find_instance(d_optimizers, optimizer);
  uint32_t identity = known != nullptr ? *known : ++d_last_identity;
  if (known == nullptr) {
    keep_instance(&d_optimizers, optimizer, identity);
    tell("add_optimizer", identity, optimizer);
  }
  Py_DECREF(optimizer);
  return identity;
}

}  // namespace otp_python
