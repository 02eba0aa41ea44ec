// Labels: the class that record_function derives from. A class in Python is three times as slow.
#include "source.h"

#include <structmember.h>

#include <cstddef>

namespace otp_python {

namespace {

// The object's address is the event's identity. One object can be entered several times at once, on one thread (each
// exit then ends the innermost) and on several (each ends its own).
struct Label {
  PyObject_HEAD PyObject* name;
  PyObject* args;
  int64_t state;
  char on_exit;
};

// What the end of its block does. As a bool it is run_callbacks_on_exit.
constexpr char kLeaves = 0;       // leaves it open; finish() ends it
constexpr char kEnds = 1;         // ends it
constexpr char kEndsInGraph = 2;  // ends it, and it was shown to a graph

// Of torch.jit.trace: what is called with the labels that are entered and left meanwhile, and how many calls are traced
// on all threads and on this one.
PyObject* g_graph = nullptr;
uint32_t g_traced = 0;
thread_local uint32_t t_traced = 0;

// States, beside the recorder's id of the thread that it was entered on (0: nothing recorded it). One that was entered
// while it was open stays shared: whose end comes on a thread that recorded no begin could not be told, so only a
// thread's own are ended.
constexpr int64_t kClosed = -1;
constexpr int64_t kShared = -2;

Label* as_label(PyObject* self) { return reinterpret_cast<Label*>(self); }

// Label(name, args=None). The usual call has one positional argument; the general parser costs more than all the rest.
int label_init(PyObject* self, PyObject* positional, PyObject* keywords) {
  PyObject *name = nullptr, *args = Py_None;
  if (keywords == nullptr && PyTuple_Size(positional) == 1) {
    name = PyTuple_GetItem(positional, 0);
  } else {
    static char name_keyword[] = "name", args_keyword[] = "args";
    static char* names[] = {name_keyword, args_keyword, nullptr};
    if (!PyArg_ParseTupleAndKeywords(positional, keywords, "O|O:record_function", names, &name, &args)) return -1;
  }
  if (!PyUnicode_Check(name)) {
    PyErr_Format(PyExc_TypeError, "the name of a label must be a str, not %R: record_function(\"forward\")", name);
    return -1;
  }
  if (args != Py_None && !PyUnicode_Check(args)) {
    PyErr_Format(PyExc_TypeError, "the args of a label must be a str or None, not %R: record_function(\"step\", \"7\")",
                 args);
    return -1;
  }
  Label* label = as_label(self);
  PyObject *old_name = label->name, *old_args = label->args;
  Py_INCREF(name);
  Py_INCREF(args);
  label->name = name;
  label->args = args;
  label->state = kClosed;
  label->on_exit = kEnds;
  Py_XDECREF(old_name);
  Py_XDECREF(old_args);
  return 0;
}

void label_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(as_label(self)->name);
  Py_XDECREF(as_label(self)->args);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// The arguments as an input of the event, a string. False with an exception set.
bool add_args(Label* label, int64_t* words, otp_begin_args* event) {
  if (!PyUnicode_Check(label->args)) return true;
  Py_ssize_t size = 0;
  PyObject* owner = nullptr;
  const char* text = utf8(label->args, &size, &owner);
  if (text == nullptr) return false;
  uint32_t id = g_api->intern(text, static_cast<uint32_t>(size), OTP_NAME_TEXT);
  Py_XDECREF(owner);
  words[0] = 1;
  words[1] = OTP_INPUT_STRING | static_cast<int64_t>(id) << 32;
  event->inputs = words;
  event->input_words = 2;
  return true;
}

// False with an exception set.
bool has_name(const Label* label) {
  if (label->name != nullptr) return true;
  PyErr_SetString(PyExc_TypeError, "this label has no name: its __init__ was not called");
  return false;
}

// The recorder's id of the thread, 0 where nothing records it, or -1 with an exception set.
int64_t begin(Label* label) {
  if (!has_name(label)) return -1;
  Py_ssize_t size = 0;
  PyObject* owner = nullptr;
  const char* name = utf8(label->name, &size, &owner);
  if (name == nullptr) return -1;
  otp_begin_args event = {};
  event.key = label;
  event.name = name;
  event.name_size = static_cast<uint32_t>(size);
  event.scope = kUserScope;
  event.kind = OTP_EVENT_LABEL;
  event.nests = 1;
  event.sequence_nr = -1;
  int64_t words[2];
  if (__atomic_load_n(g_api->requests_inputs, __ATOMIC_RELAXED) != 0 && !add_args(label, words, &event)) {
    Py_XDECREF(owner);
    return -1;
  }
  // Beginning may ask Python for the context, and what runs there may give the label another name.
  PyObject* kept = label->name;
  Py_INCREF(kept);
  int64_t thread = g_api->begin(&event);
  Py_DECREF(kept);
  Py_XDECREF(owner);
  return thread;
}

// Tells the graph that this thread traces, if it traces one. What goes wrong there is not the program's.
void show_graph(PyObject* self, bool begins) {
  if (t_traced == 0 || g_graph == nullptr) return;
  Unraising guard;
  PyObject* result = PyObject_CallFunctionObjArgs(g_graph, self, begins ? Py_True : Py_False, nullptr);
  Py_XDECREF(result);
}

// One that is open already, or whose __init__ was not called.
bool share(Label* label) {
  if (!has_name(label)) return false;
  label->state = kShared;
  return true;
}

PyObject* label_enter(PyObject* self, PyObject*) {
  Label* label = as_label(self);
  int64_t thread = active_sessions(OTP_EVENT_LABEL) == 0 ? 0 : begin(label);
  if (thread < 0) return nullptr;
  if (__builtin_expect(label->state == kClosed, 1)) {
    label->state = thread;
  } else if (!share(label)) {
    return nullptr;
  }
  if (__builtin_expect(g_traced != 0, 0)) {
    if (label->on_exit == kEnds) label->on_exit = kEndsInGraph;
    show_graph(self, true);
  }
  Py_INCREF(self);
  return self;
}

void end(Label* label, uint8_t flags, const char* error, uint32_t error_size) {
  int64_t thread = label->state;
  if (thread >= 0) label->state = kClosed;
  // Ended here even when the last enter was not recorded: an earlier one of the same object may have been.
  if (g_api->end(label, flags, error, error_size) == 0 && thread > 0)
    g_api->end_elsewhere(label, static_cast<uint32_t>(thread), 0, flags, error, error_size);
}

bool end_with_error(Label* label, PyObject* type) {
  PyObject* name = class_name(type);
  Py_ssize_t size = 0;
  PyObject* owner = nullptr;
  const char* error = name == nullptr ? nullptr : utf8(name, &size, &owner);
  bool ok = error != nullptr;
  end(label, OTP_FLAG_ERROR, error, ok ? static_cast<uint32_t>(size) : 0);
  Py_XDECREF(name);
  Py_XDECREF(owner);
  return ok;
}

// Ends the label; `type` is the class of the exception that left it, or None. GeneratorExit closes a generator early;
// it is how one ends, not an error.
PyObject* finish(PyObject* self, PyObject* type) {
  if (type == Py_None || type == PyExc_GeneratorExit) {
    end(as_label(self), 0, nullptr, 0);
  } else if (!end_with_error(as_label(self), type)) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Where there is more to do at the end of its block than to end it. One that continues until a future is done leaves
// the stack of parents.
__attribute__((noinline)) PyObject* exit_otherwise(PyObject* self, PyObject* type) {
  show_graph(self, false);
  if (as_label(self)->on_exit != kLeaves) return finish(self, type);
  g_api->suspend(self);
  Py_RETURN_NONE;
}

// __exit__(type, value, traceback) -> None.
PyObject* label_exit(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "__exit__() takes three arguments, %zd given", count);
  if (args[0] != Py_None) show_error(args[0], args[1], args[2]);
  return as_label(self)->on_exit == kEnds ? finish(self, args[0]) : exit_otherwise(self, args[0]);
}

// Whether it was entered and has not ended.
PyObject* label_is_open(PyObject* self, PyObject*) { return PyBool_FromLong(as_label(self)->state != kClosed); }

// Takes the label off the stack of parents while its coroutine waits, and puts it back. False when it is not open here.
PyObject* label_suspend(PyObject* self, PyObject*) { return PyBool_FromLong(g_api->suspend(self)); }
PyObject* label_resume(PyObject* self, PyObject*) { return PyBool_FromLong(g_api->resume(self)); }

// traced(function, *arguments, **keywords): calls it, and tells the graph that it begins and ends, as of a label None,
// and of the labels of this thread meanwhile. No function of Python's, whose line would be in what is traced.
PyObject* traced(PyObject*, PyObject* arguments, PyObject* keywords) {
  PyObject* function = PyTuple_GetItem(arguments, 0);
  PyObject* rest = function == nullptr ? nullptr : PyTuple_GetSlice(arguments, 1, PyTuple_Size(arguments));
  if (rest == nullptr) return nullptr;
  ++g_traced, ++t_traced;
  show_graph(Py_None, true);
  PyObject* result = PyObject_Call(function, rest, keywords);
  show_graph(Py_None, false);
  --g_traced, --t_traced;
  Py_DECREF(rest);
  return result;
}

// show_labels(graph): graph(label, begins) is called while a thread traces, on that thread.
PyObject* show_labels(PyObject*, PyObject* graph) {
  PyObject* before = g_graph;
  Py_INCREF(graph);
  g_graph = graph;
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

PyMethodDef g_methods[] = {{"traced", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(traced)),
                            METH_VARARGS | METH_KEYWORDS, nullptr},
                           {"show_labels", show_labels, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

PyMethodDef g_label_methods[] = {
    {"__enter__", label_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(label_exit)), METH_FASTCALL, nullptr},
    {"finish", finish, METH_O, nullptr},
    {"is_open", label_is_open, METH_NOARGS, nullptr},
    {"suspend", label_suspend, METH_NOARGS, nullptr},
    {"resume", label_resume, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef g_label_members[] = {{"name", T_OBJECT_EX, offsetof(Label, name), READONLY, nullptr},
                                 {"args", T_OBJECT_EX, offsetof(Label, args), READONLY, nullptr},
                                 {"run_callbacks_on_exit", T_BOOL, offsetof(Label, on_exit), 0, nullptr},
                                 {nullptr, 0, 0, 0, nullptr}};

PyType_Slot g_label_slots[] = {{Py_tp_init, reinterpret_cast<void*>(label_init)},
                               {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                               {Py_tp_dealloc, reinterpret_cast<void*>(label_dealloc)},
                               {Py_tp_methods, g_label_methods},
                               {Py_tp_members, g_label_members},
                               {0, nullptr}};

PyType_Spec g_label_spec = {"otel_torchprof._native._python.Label", sizeof(Label), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, g_label_slots};

}  // namespace

int add_labels(PyObject* module) {
  PyObject* type = PyType_FromSpec(&g_label_spec);
  int status = type == nullptr ? -1 : PyObject_SetAttrString(module, "Label", type);
  Py_XDECREF(type);
  return status != 0 ? status : PyModule_AddFunctions(module, g_methods);
}

}  // namespace otp_python
