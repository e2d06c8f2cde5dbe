// The Python module `fastqt._C`. It has no functions: importing it loads this library, and loading
// the library registers the operators that the other source files define, which torch then has as
// torch.ops.fastqt.*.
#include <Python.h>

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
