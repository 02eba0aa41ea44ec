// The tracer's way to come to know of calls since Python 3.12: events of sys.monitoring, with callbacks in C.
#ifndef OTEL_TORCHPROF_SOURCES_PYTHON_MONITORING_H_
#define OTEL_TORCHPROF_SOURCES_PYTHON_MONITORING_H_

#include "tracer.h"

namespace otp_python {

// What is needed of the interpreter is there. Called once, on a thread that runs Python code.
bool can_monitor();

const Mechanism* monitoring();

}  // namespace otp_python

#endif  // OTEL_TORCHPROF_SOURCES_PYTHON_MONITORING_H_
