// The native extension `fastqt._C`: the schemas of its operators, and the module
// that Python imports to register them. Each operator lives in its own file.
#include <Python.h>

#include <torch/csrc/stable/library.h>

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
