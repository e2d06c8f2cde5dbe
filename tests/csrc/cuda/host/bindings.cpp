// The module small_host for Python. It names each field of SmallProblem that a test sets, so that a
// field that is renamed or gets another type fails to compile here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "small_host.h"

namespace py = pybind11;
using fastqt::cuda::Area;
using fastqt::cuda::SmallProblem;
using fastqt::cuda::Tiles;

namespace {

// Sets a pointer of a problem to the elements of an array, which must be those that the pointer
// wants, and contiguous. They are not converted: the kernel writes through pointers to elements
// that are not const.
template <class Element>
void set_pointer(Element*& pointer, const std::string& name, const py::array& array) {
  using Value = std::remove_const_t<Element>;
  if constexpr (!std::is_void_v<Value>)
    if (!array.dtype().equal(py::dtype::of<Value>()))
      throw py::type_error(name + ": want " + std::string(py::str(py::dtype::of<Value>())) +
                           ", got " + std::string(py::str(array.dtype())));
  if (!(array.flags() & py::array::c_style))
    throw py::value_error(name + ": want a contiguous array");
  if constexpr (std::is_const_v<Element>) {
    pointer = static_cast<Element*>(array.data());
  } else {
    pointer = static_cast<Element*>(
        const_cast<py::array&>(array).mutable_data());  // raises if it is read-only
  }
}

// Binds a pointer as a property that takes an array, which lives as long as the problem.
template <class Element>
void bind_pointer(py::class_<SmallProblem>& problem, const char* name,
                  Element* SmallProblem::* field) {
  const auto set = [=](SmallProblem& p, const py::array& array) {
    set_pointer(p.*field, name, array);
  };
  problem.def_property(name, nullptr,
                       py::cpp_function(set, py::is_method(problem), py::keep_alive<1, 2>()));
}

py::tuple numbers(const Area& area) {
  return py::make_tuple(area.m16_tile, area.m16_tiles, area.n8_tile, area.n8_tiles);
}

}  // namespace

PYBIND11_MODULE(small_host, module) {
  py::class_<Tiles>(module, "Tiles")
      .def_readwrite("splits", &Tiles::splits)
      .def_readwrite("score_down", &Tiles::score_down)
      .def_readwrite("score_across", &Tiles::score_across)
      .def_readwrite("query_down", &Tiles::query_down)
      .def_readwrite("candidate_down", &Tiles::candidate_down)
      .def_readwrite("gradient_across", &Tiles::gradient_across);

  py::class_<SmallProblem> problem(module, "SmallProblem");
  problem.def(py::init([] { return SmallProblem{}; }))
      .def_readwrite("N", &SmallProblem::N)
      .def_readwrite("M", &SmallProblem::M)
      .def_readwrite("D", &SmallProblem::D)
      .def_readwrite("mix", &SmallProblem::mix)
      .def_readwrite("scale_value", &SmallProblem::scale_value)
      .def_readwrite("diagonal", &SmallProblem::diagonal)
      .def_readwrite("row_weight", &SmallProblem::row_weight)
      .def_readwrite("tiles", &SmallProblem::tiles);
  bind_pointer(problem, "queries", &SmallProblem::queries);
  bind_pointer(problem, "candidates", &SmallProblem::candidates);
  bind_pointer(problem, "row_negatives", &SmallProblem::row_negatives);
  bind_pointer(problem, "partners", &SmallProblem::partners);
  bind_pointer(problem, "scale", &SmallProblem::scale);
  bind_pointer(problem, "starts", &SmallProblem::starts);
  bind_pointer(problem, "columns", &SmallProblem::columns);
  bind_pointer(problem, "weights", &SmallProblem::weights);
  bind_pointer(problem, "row_weights", &SmallProblem::row_weights);
  bind_pointer(problem, "logsumexp", &SmallProblem::logsumexp);
  bind_pointer(problem, "mass", &SmallProblem::mass);
  bind_pointer(problem, "loss", &SmallProblem::loss);
  bind_pointer(problem, "total", &SmallProblem::total);
  bind_pointer(problem, "dqueries", &SmallProblem::dqueries);
  bind_pointer(problem, "dcandidates", &SmallProblem::dcandidates);
  bind_pointer(problem, "drow_negatives", &SmallProblem::drow_negatives);
  bind_pointer(problem, "dscale", &SmallProblem::dscale);

  module.def("run",
             [](const SmallProblem& p, const std::string& arithmetic, int blocks, uint64_t seed) {
               const std::string error = fastqt::host::run(p, arithmetic, blocks, seed);
               if (!error.empty()) throw std::runtime_error(error);
             });
  module.def("chosen_tiles", &fastqt::host::chosen_tiles);
  module.def("shared_bytes", &fastqt::host::shared_bytes);
  module.def("largest_tile", [](const std::string& arithmetic) {
    const auto costs = fastqt::host::tile_costs(arithmetic);
    return py::make_tuple(costs.m16_tiles, costs.n8_tiles);
  });
  module.def("areas", [](int index, int m16_tiles, int down, int n8_tiles, int across) {
    py::list found;
    for (const Area& area : fastqt::host::areas(index, m16_tiles, down, n8_tiles, across))
      found.append(numbers(area));
    return found;
  });
}
