// This package as a tool of sys.monitoring: its number there, its callbacks, and what they are called for.
//
// Python's lock is held in all of this.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_MONITORING_TOOL_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_MONITORING_TOOL_H_

#include <initializer_list>

#include "source.h"

namespace otp_python {

// As the interpreter's vectorcallfunc, which the stable ABI has since Python 3.12 only.
using Callback = PyObject* (*)(PyObject*, PyObject* const*, size_t, PyObject*);

using Codes = std::initializer_list<PyObject*>;  // or None

struct EventCallback {
  const char* event;  // its name in sys.monitoring.events
  Callback callback;
};

// Becomes a tool with these callbacks, where this is none yet; nothing is asked for. False with an exception set where
// all numbers are in use, or an audit hook forbids it.
bool take_tool(const EventCallback* callbacks, size_t count);
// Asks for nothing, not even of these codes, and is no tool any more.
void leave_tool(const Codes& codes);

// What to be called back for from now on. all: calls of every code, and with `functions` those of C functions; else
// only those of the codes. 0, or -1 with an exception set.
int ask_for_events(bool all, bool functions, const Codes& codes);

// What a callback answers that is not to be called back from there again; a new reference.
PyObject* disabled();
// Takes back all such answers, where there were any. 0, or -1 with an exception set.
int restart_disabled();

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_MONITORING_TOOL_H_
