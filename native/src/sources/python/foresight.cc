// Steps that are foreseen. If the latest steps of a loop had the same phases, a session that leaves some steps out
// records nothing outside of contexts in these. Steps are learned from drained events, long after they have begun, but
// which phase begins the next one is known.
//
// A step is recorded from the end of the last phase of the step before it on, so that it has the labels and calls that
// its first phase is in. What is not as it always was, a phase that the loop does not have, ends the foresight: all is
// recorded until the loop is known again.
//
// Python's lock is held in all of this.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <new>
#include <string>
#include <vector>

#include "source.h"

namespace otp_python {

namespace {

struct Phase {
  uint32_t part;
  int64_t object;

  bool operator==(const Phase& other) const { return part == other.part && object == other.object; }
};

// What is foreseen for one session.
struct Foresight {
  bool is_on = false;
  bool is_muted = false;
  pid_t process = 0;
  unsigned long thread = 0;   // of the loop, as Python has it
  uint64_t relevant = 0;      // parts that say something of a loop, as bits
  std::vector<Phase> phases;  // of a step, its first and its last one where they stand
  uint64_t count = 0;         // of the steps that have begun since
  uint64_t first_event = 0;   // the phase with which the first of them did
  uint64_t event = 0;         // and the latest
  bool is_complete = true;    // the last phase of the latest has ended
  // Whether each step is recorded, from this count on. A policy may be the user's code, which is not called here: it is
  // asked beforehand. Steps of which it was not asked are recorded.
  uint64_t selected_from = 1;
  std::string selected;
};
std::array<Foresight, OTP_MAX_SESSIONS> g_foresights;
uint32_t g_foreseeing = 0;  // sessions that do

bool is_recorded(const Foresight& foresight, uint64_t count) {
  const uint64_t at = count - foresight.selected_from;  // far beyond the end for what is before it
  return at >= foresight.selected.size() || foresight.selected[at] != 0;
}

void mute(uint32_t bit, Foresight& foresight, bool muted) {
  if (muted == foresight.is_muted) return;
  foresight.is_muted = muted;
  g_api->mute_roots(bit, muted ? 1 : 0);
}

void forget(uint32_t bit) {
  Foresight& foresight = g_foresights[bit];
  // In a forked child the session is another one, if there is any.
  if (foresight.is_on && foresight.process == getpid()) mute(bit, foresight, false);
  foresight = Foresight();
  g_foreseeing &= ~(1u << bit);
}

// Whether a phase of the calling thread says something of the loop.
bool concerns(uint32_t bit, const Phase& phase) {
  const Foresight& foresight = g_foresights[bit];
  if (foresight.process != getpid()) forget(bit);
  return foresight.is_on && foresight.thread == PyThread_get_thread_ident() &&
         (foresight.relevant >> phase.part & 1) != 0;
}

void phase_began(uint32_t bit, const Phase& phase) {
  Foresight& foresight = g_foresights[bit];
  const std::vector<Phase>& phases = foresight.phases;
  if (std::find(phases.begin(), phases.end(), phase) == phases.end()) return forget(bit);
  if (phase == phases.front()) {
    // A step that was begun anew, as where an exception left it or a batch was skipped: it may not count as one.
    if (!foresight.is_complete) return forget(bit);
    uint32_t consumers = 0;
    foresight.is_complete = false;
    foresight.event = g_api->innermost(&consumers);
    if (++foresight.count == 1) foresight.first_event = foresight.event;
    mute(bit, foresight, !is_recorded(foresight, foresight.count));
  }
}

void phase_ended(uint32_t bit, const Phase& phase) {
  Foresight& foresight = g_foresights[bit];
  if (!(phase == foresight.phases.back())) return;
  if (foresight.is_complete && foresight.count > 0) return forget(bit);
  foresight.is_complete = true;
  if (is_recorded(foresight, foresight.count + 1)) mute(bit, foresight, false);
}

// Which bit an argument is that stands for a session; OTP_MAX_SESSIONS with an exception set where it is none.
uint32_t bit_of(PyObject* consumer) {
  unsigned long mask = PyLong_AsUnsignedLong(consumer);
  if (PyErr_Occurred() != nullptr) return OTP_MAX_SESSIONS;
  for (uint32_t bit = 0; bit < OTP_MAX_SESSIONS; ++bit)
    if (mask == 1ul << bit) return bit;
  PyErr_Format(PyExc_ValueError, "%lu is the bit of no session", mask);
  return OTP_MAX_SESSIONS;
}

// foresee(consumer, thread, phases, relevant); see _python.pyi.
PyObject* foresee(PyObject*, PyObject* arguments) {
  PyObject *number = nullptr, *phases = nullptr;
  unsigned long thread = 0;
  unsigned long long relevant = 0;
  if (PyArg_ParseTuple(arguments, "OkO!K", &number, &thread, &PyTuple_Type, &phases, &relevant) == 0) return nullptr;
  uint32_t bit = bit_of(number);
  if (bit == OTP_MAX_SESSIONS) return nullptr;
  std::vector<Phase> known(static_cast<size_t>(PyTuple_Size(phases)));
  for (size_t i = 0; i < known.size(); ++i) {
    unsigned int part = 0;
    long long object = 0;
    if (PyArg_ParseTuple(PyTuple_GetItem(phases, static_cast<Py_ssize_t>(i)), "IL", &part, &object) == 0)
      return nullptr;
    known[i] = {part, object};
  }
  if (known.empty()) return PyErr_Format(PyExc_ValueError, "nothing to foresee");
  forget(bit);
  Foresight& foresight = g_foresights[bit];
  foresight.is_on = true;
  foresight.process = getpid();
  foresight.thread = thread;
  foresight.relevant = relevant;
  foresight.phases = std::move(known);
  g_foreseeing |= 1u << bit;
  Py_RETURN_NONE;
}

// foreseen(consumer) and forget_foresight(consumer); see _python.pyi.
PyObject* foreseen(PyObject*, PyObject* number) {
  uint32_t bit = bit_of(number);
  if (bit == OTP_MAX_SESSIONS) return nullptr;
  const Foresight& foresight = g_foresights[bit];
  if (!foresight.is_on || foresight.process != getpid()) Py_RETURN_NONE;
  return Py_BuildValue("KKK", static_cast<unsigned long long>(foresight.first_event),
                       static_cast<unsigned long long>(foresight.event),
                       static_cast<unsigned long long>(foresight.count));
}

PyObject* forget_foresight(PyObject*, PyObject* number) {
  uint32_t bit = bit_of(number);
  if (bit == OTP_MAX_SESSIONS) return nullptr;
  forget(bit);
  Py_RETURN_NONE;
}

// select_foreseen(consumer, count, selected); see _python.pyi.
PyObject* select_foreseen(PyObject*, PyObject* arguments) {
  PyObject* number = nullptr;
  unsigned long long count = 0;
  const char* selected = nullptr;
  Py_ssize_t size = 0;
  if (PyArg_ParseTuple(arguments, "OKy#", &number, &count, &selected, &size) == 0) return nullptr;
  uint32_t bit = bit_of(number);
  if (bit == OTP_MAX_SESSIONS) return nullptr;
  Foresight& foresight = g_foresights[bit];
  if (foresight.is_on) {
    foresight.selected_from = count;
    foresight.selected.assign(selected, static_cast<size_t>(size));
  }
  Py_RETURN_NONE;
}

PyMethodDef g_methods[] = {{"foresee", foresee, METH_VARARGS, nullptr},
                           {"foreseen", foreseen, METH_O, nullptr},
                           {"select_foreseen", select_foreseen, METH_VARARGS, nullptr},
                           {"forget_foresight", forget_foresight, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

void foresee_begin(uint32_t part, int64_t object) {
  for (uint32_t rest = g_foreseeing; rest != 0; rest &= rest - 1) {
    auto bit = static_cast<uint32_t>(__builtin_ctz(rest));
    if (concerns(bit, {part, object})) phase_began(bit, {part, object});
  }
}

void foresee_end(uint32_t part, int64_t object) {
  for (uint32_t rest = g_foreseeing; rest != 0; rest &= rest - 1) {
    auto bit = static_cast<uint32_t>(__builtin_ctz(rest));
    if (concerns(bit, {part, object})) phase_ended(bit, {part, object});
  }
}

int add_foresight(PyObject* module) { return PyModule_AddFunctions(module, g_methods); }

}  // namespace otp_python
