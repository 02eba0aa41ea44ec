#include "monitoring_tool.h"

#include <cstddef>
#include <map>

namespace otp_python {

namespace {

constexpr char kName[] = "otel_torchprof";
// Of the six, those that the interpreter's documentation gives to nobody come first: cProfile and coverage insist on
// theirs (2 and 1), and could not run beside us.
constexpr int kNumbers[] = {3, 4, 2, 1, 5};
constexpr int kNone = -1;
constexpr const char* kCalls[] = {"PY_START", "PY_RESUME", "PY_THROW", "PY_RETURN", "PY_YIELD", "PY_UNWIND"};
constexpr const char* kFunctions[] = {"CALL", "RAISE"};  // those that follow on a call come with it
constexpr const char* kOfCode[] = {"PY_START", "PY_RETURN"};
constexpr const char* kOfAnyCode[] = {"PY_UNWIND"};  // not to be had of one code

int g_tool = kNone;
const EventCallback* g_callbacks = nullptr;
size_t g_count = 0;
PyObject* g_disable = nullptr;  // sys.monitoring.DISABLE; kept for good
bool g_any_disabled = false;

// ---- objects that the interpreter calls without a detour ----

struct CallbackObject {
  PyObject_HEAD Callback callback;
};

// Called as any object is: nobody has a reason to.
PyObject* call_object(PyObject*, PyObject*, PyObject*) { Py_RETURN_NONE; }

// The layout of PyMemberDef, which limited headers before Python 3.12 leave out.
struct Member {
  const char* name;
  int type;
  Py_ssize_t offset;
  int flags;
  const char* doc;
};
constexpr int kSignedSize = 19, kReadOnly = 1;     // T_PYSSIZET, READONLY
constexpr unsigned int kHasVectorcall = 1u << 11;  // Py_TPFLAGS_HAVE_VECTORCALL
Member g_members[] = {{"__vectorcalloffset__", kSignedSize, offsetof(CallbackObject, callback), kReadOnly, nullptr},
                      {nullptr, 0, 0, 0, nullptr}};
PyType_Slot g_slots[] = {{Py_tp_call, reinterpret_cast<void*>(call_object)}, {Py_tp_members, g_members}, {0, nullptr}};
PyType_Spec g_spec = {"otel_torchprof._native._python.Callback", sizeof(CallbackObject), 0,
                      Py_TPFLAGS_DEFAULT | kHasVectorcall, g_slots};

// One for each function, borrowed, and never freed: the interpreter holds no reference while it calls an object that is
// unregistered meanwhile. Null with an exception set.
PyObject* object_of(Callback callback) {
  static auto& known = *new std::map<Callback, PyObject*>;
  static PyObject* type = PyType_FromSpec(&g_spec);
  if (type == nullptr) return PyErr_NoMemory();
  PyObject*& object = known[callback];
  if (object == nullptr) object = PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0);
  if (object != nullptr) reinterpret_cast<CallbackObject*>(object)->callback = callback;
  return object;
}

// ---- sys.monitoring ----

// Null with an exception set.
PyObject* monitoring_module() {
  PyObject* module = PySys_GetObject("monitoring");
  if (module == nullptr) PyErr_SetString(PyExc_RuntimeError, "there is no sys.monitoring");
  return module;
}

template <typename... Arguments>
PyObject* call(const char* function, const char* format, Arguments... arguments) {
  PyObject* module = monitoring_module();
  return module == nullptr ? nullptr : PyObject_CallMethod(module, function, format, arguments...);
}

// Of a call that answers nothing of interest.
int done(PyObject* answer) {
  Py_XDECREF(answer);
  return answer == nullptr ? -1 : 0;
}

// The bit of an event; -1 with an exception set.
long event_bit(const char* name) {
  PyObject* module = monitoring_module();
  PyObject* events = module == nullptr ? nullptr : PyObject_GetAttrString(module, "events");
  PyObject* number = events == nullptr ? nullptr : PyObject_GetAttrString(events, name);
  long bit = number == nullptr ? -1 : PyLong_AsLong(number);
  Py_XDECREF(number);
  Py_XDECREF(events);
  return bit;
}

template <size_t size>
bool add_bits(const char* const (&names)[size], long* set) {
  for (const char* name : names) {
    long bit = event_bit(name);
    if (bit < 0) return false;
    *set |= bit;
  }
  return true;
}

// Takes a free number. Another tool's is never taken: the interpreter refuses.
bool take_number() {
  for (int number : kNumbers) {
    if (done(call("use_tool_id", "is", number, kName)) == 0) {
      g_tool = number;
      return true;
    }
    if (PyErr_ExceptionMatches(PyExc_ValueError) == 0) return false;
    PyErr_Clear();
  }
  PyErr_SetString(PyExc_RuntimeError, "all tools of sys.monitoring are in use");
  return false;
}

bool has_number() {
  PyObject* name = g_tool == kNone ? nullptr : call("get_tool", "i", g_tool);
  bool ours = name != nullptr && PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, kName) == 0;
  Py_XDECREF(name);
  PyErr_Clear();
  return ours;
}

bool set_callback(const EventCallback& entry, PyObject* callback) {
  long bit = event_bit(entry.event);
  return bit >= 0 && done(call("register_callback", "ilO", g_tool, bit, callback)) == 0;
}

bool set_callbacks() {
  for (size_t i = 0; i < g_count; ++i) {
    PyObject* callback = object_of(g_callbacks[i].callback);
    if (callback == nullptr || !set_callback(g_callbacks[i], callback)) return false;
  }
  return true;
}

int set_events_of(PyObject* code, long events) {
  if (code == Py_None) return 0;
  return done(call("set_local_events", "iOl", g_tool, code, events));
}

}  // namespace

bool take_tool(const EventCallback* callbacks, size_t count) {
  if (has_number()) return true;
  PyObject* module = monitoring_module();
  if (g_disable == nullptr && module != nullptr) g_disable = PyObject_GetAttrString(module, "DISABLE");
  if (g_disable == nullptr || !take_number()) return false;
  g_callbacks = callbacks;
  g_count = count;
  if (set_callbacks()) return true;
  Unraising failure;
  leave_tool({});
  return false;
}

void leave_tool(const Codes& codes) {
  if (has_number()) {
    for (PyObject* code : codes) set_events_of(code, 0);
    PyErr_Clear();
    done(call("set_events", "ii", g_tool, 0));
    PyErr_Clear();
    for (size_t i = 0; i < g_count; ++i) {
      set_callback(g_callbacks[i], Py_None);
      PyErr_Clear();
    }
    restart_disabled();  // or the next tool with this number would not be called back either
    PyErr_Clear();
    done(call("free_tool_id", "i", g_tool));
    PyErr_Clear();
  }
  g_tool = kNone;
}

int ask_for_events(bool all, bool functions, const Codes& codes) {
  long everywhere = 0;
  long of_code = 0;
  bool known = all ? add_bits(kCalls, &everywhere) : add_bits(kOfAnyCode, &everywhere) && add_bits(kOfCode, &of_code);
  if (!known || (all && functions && !add_bits(kFunctions, &everywhere))) return -1;
  for (PyObject* code : codes)
    if (set_events_of(code, of_code) != 0) return -1;
  return done(call("set_events", "il", g_tool, everywhere));
}

PyObject* disabled() {
  g_any_disabled = true;
  return Py_NewRef(g_disable);
}

int restart_disabled() {
  if (!g_any_disabled) return 0;
  g_any_disabled = false;
  return done(call("restart_events", nullptr));
}

}  // namespace otp_python
