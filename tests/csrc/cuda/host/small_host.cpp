// The module small_host for Python: the one-launch kernel executed on a CPU. An arithmetic is
// float32, tf32, bfloat16 or float16.
#include <pybind11/pybind11.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "cuda/small_kernel.cuh"
#include "cuda/tiling.h"

namespace py = pybind11;
using namespace fastqt::cuda;

namespace {

// Calls visit(arithmetic) for that of a name.
template <class F>
auto with_arithmetic(const std::string& name, const F& visit) {
  if (name == "float32") return visit(FloatArithmetic{});
  if (name == "tf32") return visit(Tf32Arithmetic{});
  if (name == "bfloat16") return visit(HalfArithmetic<bfloat16>{});
  if (name == "float16") return visit(HalfArithmetic<float16>{});
  throw std::invalid_argument("no arithmetic " + name);
}

// The problem in a buffer, as Python's ctypes lays it out.
SmallProblem& problem_in(const py::buffer& buffer) {
  const py::buffer_info memory = buffer.request(/*writable=*/true);
  if (memory.size * memory.itemsize != sizeof(SmallProblem))
    throw py::value_error("SmallProblem has other fields");
  return *static_cast<SmallProblem*>(memory.ptr);
}

// Runs the kernel on a problem whose workspace is not laid out. Its tiles are chosen if it has none
// (0 splits). Raises RuntimeError if something went wrong.
void run(const py::buffer& buffer, const std::string& arithmetic, int blocks, uint64_t seed) {
  SmallProblem problem = problem_in(buffer);
  const std::string error = with_arithmetic(arithmetic, [&]<class P>(P) {
    constexpr int kElementBytes = sizeof(typename P::Value);
    if (problem.tiles.splits == 0) problem.tiles = choose_tiles(problem, P::kCosts, blocks);
    const int64_t bytes = lay_out_workspace(problem, kElementBytes, nullptr);
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(16, bytes),
                                                             &std::free);
    std::memset(memory.get(), 0xff, bytes);  // NaN in every format
    lay_out_workspace(problem, kElementBytes, memory.get());
    return fastqt::host::Grid(blocks, kThreads, SmallKernel<P>::kSharedBytes, seed).run([&] {
      small_kernel<P>(problem);
    });
  });
  if (!error.empty()) throw std::runtime_error(error);
}

// Gives a problem the tiles that are chosen for a number of blocks.
void choose(const py::buffer& buffer, const std::string& arithmetic, int blocks) {
  SmallProblem& problem = problem_in(buffer);
  problem.tiles = with_arithmetic(
      arithmetic, [&]<class P>(P) { return choose_tiles(problem, P::kCosts, blocks); });
}

// The m16 tiles and n8 tiles of the largest tile, and the bytes of shared memory of a block.
py::tuple sizes(const std::string& arithmetic) {
  return with_arithmetic(arithmetic, []<class P>(P) {
    const int shared = SmallKernel<P>::kSharedBytes;
    return py::make_tuple(P::kCosts.m16_tiles, P::kCosts.n8_tiles, shared);
  });
}

py::tuple numbers(const Area& area) {
  return py::make_tuple(area.m16_tile, area.m16_tiles, area.n8_tile, area.n8_tiles);
}

// Of the m16 tiles and n8 tiles of a matrix in `down` x `across` tiles: the tile of an index, and
// the share of each of its warps.
py::tuple areas(int index, int m16_tiles, int down, int n8_tiles, int across) {
  const Area tile = tile_at(index, m16_tiles, down, n8_tiles, across);
  py::list shares;
  for (int warp = 0; warp < kWarps; ++warp) shares.append(numbers(warp_share(tile, warp)));
  return py::make_tuple(numbers(tile), shares);
}

}  // namespace

PYBIND11_MODULE(small_host, module) {
  module.def("run", &run);
  module.def("choose", &choose);
  module.def("sizes", &sizes);
  module.def("areas", &areas);
}
