// Names are worked out once and are numbers from then on. What a name is found by is an address, so what has that
// address is kept alive as long as the tracer runs, or is only believed where a weak reference still leads to it.
#include <unistd.h>

#include <cstring>

#include "python_frames.h"

namespace otp_python {

namespace {

constexpr long kGenerator = 0x20, kCoroutine = 0x80, kAsyncGenerator = 0x200;  // of co_flags
constexpr int kUnknown = -1;
constexpr int kMostWords = 6;  // of a builtin_function_or_method that are looked at: it has as many at least

int g_definition_at = kUnknown;  // in words: no part of the stable ABI, so it is looked for

const void* word(const PyObject* object, int at) {
  const void* value;
  std::memcpy(&value, reinterpret_cast<const char*>(object) + static_cast<size_t>(at) * sizeof value, sizeof value);
  return value;
}

PyObject* nothing(PyObject*, PyObject*) { Py_RETURN_NONE; }

PyMethodDef g_probe = {"probe", nothing, METH_NOARGS, nullptr};

uint32_t unknown_name() {
  PyErr_Clear();
  return g_api->intern("(unknown)", UINT32_MAX);
}

// The id of a str that is released; where it is null, of what stands for names that cannot be had.
uint32_t interned(PyObject* text) {
  Py_ssize_t size = 0;
  PyObject* owner = nullptr;
  const char* data = text == nullptr ? nullptr : utf8(text, &size, &owner);
  uint32_t id = data == nullptr ? unknown_name() : g_api->intern(data, static_cast<uint32_t>(size));
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

bool FrameNames::find_fields() {
  Unraising guard;
  PyObject* function = PyCFunction_New(&g_probe, Py_None);
  for (int at = 0; function != nullptr && at < kMostWords; ++at)
    if (word(function, at) == &g_probe) g_definition_at = at;
  Py_XDECREF(function);
  return g_definition_at != kUnknown;
}

FrameNames::~FrameNames() {
  for (const Code& code : d_all_codes) Py_DECREF(code.object);
  for (const auto& [address, module] : d_modules) Py_DECREF(module.reference);
  for (PyObject* object : d_kept) Py_DECREF(object);
  Py_XDECREF(d_naming.prefixes);
  Py_XDECREF(d_naming.own);
  Py_XDECREF(d_naming.open);
  Py_XDECREF(d_naming.module_call);
}

const void* FrameNames::definition_of(PyObject* function) { return word(function, g_definition_at); }

Code* FrameNames::add_code(PyObject* object) {
  Unraising guard;
  PyObject* path = PyObject_GetAttrString(object, "co_filename");
  bool own = path != nullptr && starts_with(path, d_naming.own);
  bool closed = own && PySequence_Contains(d_naming.open, path) == 0;
  Py_XDECREF(path);
  bool suspended = (flags_of(object) & (kGenerator | kCoroutine | kAsyncGenerator)) != 0;
  auto number = static_cast<uint32_t>(d_all_codes.size());
  Code* code =
      &d_all_codes.emplace_back(Code{object, number, 0, own, closed, suspended, object == d_naming.module_call});
  Py_INCREF(object);
  d_codes.add(object, code);
  return code;
}

uint32_t FrameNames::of_new_call(PyFrameObject* frame, Code& code) {
  if (code.is_module_call) return of_module(frame);
  uint32_t name = at_line(code, PyFrame_GetLineNumber(frame));
  if (!code.is_suspended) code.name = name;
  return name;
}

uint32_t FrameNames::of_running(PyFrameObject* frame, Code& code) {
  return code.is_module_call ? of_module(frame) : at_line(code, PyFrame_GetLineNumber(frame));
}

uint32_t FrameNames::at_line(const Code& code, int line) {
  uint64_t key = static_cast<uint64_t>(code.number) << 32 | static_cast<uint32_t>(line);
  auto found = d_lines.find(key);
  if (found != d_lines.end()) return found->second;
  Unraising guard;
  PyObject* path = shortened(PyObject_GetAttrString(code.object, "co_filename"));
  PyObject* function = path == nullptr ? nullptr : PyObject_GetAttrString(code.object, "co_name");
  uint32_t name = interned(function == nullptr ? nullptr : PyUnicode_FromFormat("%U(%d): %U", path, line, function));
  Py_XDECREF(function);
  Py_XDECREF(path);
  return d_lines[key] = name;
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
  if (self != nullptr && is_own(self)) {
    d_function_names.push_back(0);
  } else {
    PyObject* text = PyObject_Repr(function);
    bool of_instance = text != nullptr && self != nullptr && !PyType_Check(self);
    d_function_names.push_back(of_instance ? name_without_address(text) : interned(text));
  }
  PyObject* kept = of_class ? reinterpret_cast<PyObject*>(Py_TYPE(self)) : function;
  d_kept.push_back(kept);
  Py_INCREF(kept);
  d_functions.add(definition_of(function), &d_function_names.back());
  return d_function_names.back();
}

uint32_t FrameNames::of_module(PyFrameObject* frame) {
  Unraising guard;
  PyObject* locals = PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_locals");
  PyObject* module = locals == nullptr ? nullptr : PyMapping_GetItemString(locals, "self");
  Py_XDECREF(locals);
  if (module == nullptr) return unknown_name();
  auto found = d_modules.find(module);
  bool known =
      found != d_modules.end() && (!found->second.is_weak || PyWeakref_GetObject(found->second.reference) == module);
  uint32_t name = known ? found->second.name : add_module(module);
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
  PyObject* reference = PyWeakref_NewRef(module, nullptr);
  bool weak = reference != nullptr;
  if (!weak) {
    PyErr_Clear();
    reference = module;
    Py_INCREF(module);
  }
  Module& entry = d_modules[module];
  Py_XDECREF(entry.reference);
  entry = {reference, weak, name};
  return name;
}

}  // namespace otp_python
