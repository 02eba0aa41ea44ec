// How many samples and tokens the batches of torch's data loaders have, by the shapes of the tensors in them: of those
// that a thread takes itself, since whose the others are is not known.
//
// No code of the program runs for it: only dictionaries, lists and tuples are looked into, objects with a dictionary
// `data` as those of UserDict have it (such as transformers' BatchEncoding), and of tensors those of torch's own class,
// whose shape is a getter in C++.
#include "source.h"

namespace otp_python {

namespace {

constexpr int kDepth = 4;  // of what lies in one another
constexpr Py_ssize_t kMostItems = 16;
constexpr const char* kTokens = "input_ids";

// A new reference; null where there is none, without an exception.
class Owned {
 public:
  explicit Owned(PyObject* object) : d_object(object) {
    if (object == nullptr) PyErr_Clear();
  }
  ~Owned() { Py_XDECREF(d_object); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  PyObject* get() const { return d_object; }

 private:
  PyObject* d_object;
};

bool is_tensor(PyObject* object) {
  static PyObject* type = nullptr;  // owned, for as long as there are loaders
  if (type == nullptr) {
    Owned torch(PyImport_GetModule(Owned(PyUnicode_FromString("torch")).get()));
    type = torch.get() == nullptr ? nullptr : PyObject_GetAttrString(torch.get(), "Tensor");
    if (type == nullptr) PyErr_Clear();
  }
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type;
}

// What was found in a batch; negative: nothing yet.
struct Found {
  int64_t tokens = -1, samples = -1;
};

void look_at_tensor(PyObject* tensor, bool are_tokens, Found* found) {
  Owned shape(PyObject_GetAttrString(tensor, "shape"));
  Py_ssize_t dimensions = shape.get() == nullptr || !PyTuple_Check(shape.get()) ? 0 : PyTuple_Size(shape.get());
  int64_t first = 1, product = 1;
  for (Py_ssize_t i = 0; i < dimensions; ++i) {
    int64_t size = PyLong_AsLongLong(PyTuple_GetItem(shape.get(), i));
    if (PyErr_Occurred() != nullptr) return PyErr_Clear();  // it is symbolic
    if (i == 0) first = size;
    product *= size;
  }
  if (dimensions == 0) return;
  if (are_tokens) *found = {product, dimensions == 1 ? 1 : first};  // one sequence, or a batch of them
  if (found->samples < 0) found->samples = first;
}

void look_at(PyObject* object, int depth, Found* found);

void look_into(PyObject* dictionary, int depth, Found* found) {
  PyObject* tokens = PyDict_GetItemString(dictionary, kTokens);
  if (tokens != nullptr && is_tensor(tokens)) return look_at_tensor(tokens, true, found);
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; found->tokens < 0 && PyDict_Next(dictionary, &at, &key, &value) != 0;)
    look_at(value, depth, found);
}

void look_at(PyObject* object, int depth, Found* found) {
  if (is_tensor(object)) return look_at_tensor(object, false, found);
  if (depth == 0) return;
  bool is_list = PyList_Check(object) != 0;
  if (is_list || PyTuple_Check(object)) {
    Py_ssize_t size = is_list ? PyList_Size(object) : PyTuple_Size(object);
    for (Py_ssize_t i = 0; i < size && i < kMostItems && found->tokens < 0; ++i)
      look_at(is_list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i), depth - 1, found);
  } else if (PyDict_Check(object)) {
    look_into(object, depth - 1, found);
  } else if (!PyUnicode_Check(object) && !PyLong_Check(object) && !PyFloat_Check(object)) {
    Owned members(PyObject_GenericGetAttr(object, Owned(PyUnicode_FromString("__dict__")).get()));
    bool has_members = members.get() != nullptr && PyDict_Check(members.get());
    PyObject* data = has_members ? PyDict_GetItemString(members.get(), "data") : nullptr;
    if (data != nullptr && PyDict_Check(data)) look_into(data, depth - 1, found);
  }
}

// Whether the loader makes batches of what its data set returns: else that may be one sample.
bool makes_batches(PyObject* iterator) {
  Owned members(PyObject_GenericGetAttr(iterator, Owned(PyUnicode_FromString("__dict__")).get()));
  bool has_members = members.get() != nullptr && PyDict_Check(members.get());
  return has_members && PyDict_GetItemString(members.get(), "_auto_collation") == Py_True;
}

}  // namespace

void count_batch(PythonThread* thread, PyObject* iterator, PyObject* batch) {
  Found found;
  look_at(batch, kDepth, &found);
  if (found.tokens >= 0) thread->loaded.tokens += found.tokens;
  if (found.tokens >= 0 || (found.samples >= 0 && makes_batches(iterator))) thread->loaded.samples += found.samples;
}

}  // namespace otp_python
