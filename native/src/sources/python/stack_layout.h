// Finds out where this interpreter keeps what stack_reader.h reads: none of it is part of any API.
//
// Four numbers of a frame are known by version (of later ones, the last is assumed); all else is looked for in objects
// whose values are known. Whether the result is right is for the caller to prove: by reading its own stack. Nothing
// here can crash, since it only copies.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_STACK_LAYOUT_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_STACK_LAYOUT_H_

#include "source.h"
#include "stack_reader.h"

namespace otp_python {

// `frame`: the innermost of the calling thread, of a function whose name and qualified name differ; `marked`: a copy of
// its code whose first line occurs in no other field. Needs Python's lock. Null with an exception set where something
// failed, Py_None where all was found, else a text that says what was not.
PyObject* find_stack_layout(PyObject* frame, PyObject* marked);

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_STACK_LAYOUT_H_
