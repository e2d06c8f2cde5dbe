// The module vector_functions for Python: the row passes and elementary functions of csrc/cpu on 1-D numpy arrays of
// float32 or float64, which are not converted, since most functions write to them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "cpu/row_passes.h"
#include "vector_functions.h"

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

// The elements of an array that is as long as x, the row that a pass is over.
template <class T, class U>
const U* as_long_as(const Array<T>& x, const Array<U>& other) {
  if (other.size() != x.size()) throw std::invalid_argument("want arrays of one length");
  return other.data();
}

template <class T>
void bind(py::module_& module) {
  const auto x = py::arg("x").noconvert(), y = py::arg("y").noconvert(), z = py::arg("z").noconvert();
#define FASTQT_BIND(name) \
  module.def(#name, [](Array<T> x) { fastqt::map_##name(x.mutable_data(), x.size()); }, x);
  FASTQT_FOR_FUNCTIONS(FASTQT_BIND)
#undef FASTQT_BIND

  module.def("row_max", [](const Array<T>& x) { return fastqt::row_max(x.data(), x.size()); }, x);
  module.def("row_sum", [](const Array<T>& x) { return fastqt::row_sum(x.data(), x.size()); }, x);
  module.def(
      "row_exp_sum", [](const Array<T>& x, T shift) { return fastqt::row_exp_sum(x.data(), x.size(), shift); }, x,
      py::arg("shift"));
  module.def(
      "row_exp", [](Array<T> x, T shift) { return fastqt::row_exp(x.mutable_data(), x.size(), shift); }, x,
      py::arg("shift"));
  module.def("row_softplus_sum", [](const Array<T>& x) { return fastqt::row_softplus_sum(x.data(), x.size()); }, x);
  module.def(
      "row_sigmoid",
      [](Array<T> x, T factor, T offset) { return fastqt::row_sigmoid(x.mutable_data(), x.size(), factor, offset); },
      x, py::arg("factor"), py::arg("offset"));
  module.def(
      "row_add", [](Array<T> x, const Array<T>& y) { fastqt::row_add(x.mutable_data(), as_long_as(x, y), x.size()); },
      x, y);
  module.def(
      "row_scale",
      [](Array<T> x, const Array<T>& factors, T factor) {
        fastqt::row_scale(x.mutable_data(), as_long_as(x, factors), x.size(), factor);
      },
      x, y, py::arg("factor"));
  module.def(
      "row_affine",
      [](Array<T> x, T factor, T offset) { fastqt::row_affine(x.mutable_data(), x.size(), factor, offset); }, x,
      py::arg("factor"), py::arg("offset"));
  module.def(
      "row_raise",
      [](Array<T> x, const Array<T>& y) { fastqt::row_raise(x.mutable_data(), as_long_as(x, y), x.size()); }, x, y);
  module.def(
      "row_exp_add",
      [](Array<T> x, const Array<T>& y, const Array<T>& shifts) {
        fastqt::row_exp_add(x.mutable_data(), as_long_as(x, y), as_long_as(x, shifts), x.size());
      },
      x, y, z);
  module.def(
      "row_two_exps",
      [](Array<T> x, T shift, T factor, const Array<T>& shifts, const Array<T>& factors) {
        fastqt::row_two_exps(x.mutable_data(), x.size(), shift, factor, as_long_as(x, shifts), as_long_as(x, factors));
      },
      x, py::arg("shift"), py::arg("factor"), y, z);
  module.def(
      "row_exclude_group",
      [](Array<T> x, const Array<int64_t>& groups, int64_t group) {
        fastqt::row_exclude_group(x.mutable_data(), as_long_as(x, groups), x.size(), group);
      },
      x, y, py::arg("group"));
  module.def(
      "row_dot",
      [](const Array<T>& x, const Array<T>& y) { return fastqt::row_dot(x.data(), as_long_as(x, y), x.size()); }, x, y);
  module.def(
      "row_multiple",
      [](Array<T> x, const Array<T>& y, T factor, bool add) {
        fastqt::row_multiple(x.mutable_data(), as_long_as(x, y), x.size(), factor, add);
      },
      x, y, py::arg("factor"), py::arg("add"));
}

}  // namespace

PYBIND11_MODULE(vector_functions, module) {
  bind<float>(module);
  bind<double>(module);
}
