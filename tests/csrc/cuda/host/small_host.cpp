// The one-launch kernel executed on a CPU, as Python calls it by ctypes. An arithmetic is float32,
// tf32, bfloat16 or float16.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "cuda/small_kernel.cuh"
#include "cuda/tiling.h"

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

}  // namespace

extern "C" {

int problem_bytes() { return sizeof(SmallProblem); }

// Runs the kernel on a problem whose workspace is not laid out. Its tiles are chosen if it has none
// (0 splits). Returns what went wrong, empty if nothing did.
const char* run(SmallProblem* given, const char* arithmetic, int blocks, uint64_t seed) {
  static std::string error;
  error = with_arithmetic(arithmetic, [&]<class P>(P) {
    SmallProblem problem = *given;
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
  return error.c_str();
}

// Gives a problem the tiles that are chosen for a number of blocks.
void choose(SmallProblem* problem, const char* arithmetic, int blocks) {
  problem->tiles = with_arithmetic(
      arithmetic, [&]<class P>(P) { return choose_tiles(*problem, P::kCosts, blocks); });
}

// The m16 tiles and n8 tiles of the largest tile, and the bytes of shared memory of a block.
void sizes(const char* arithmetic, int* out) {
  with_arithmetic(arithmetic, [&]<class P>(P) {
    const int found[] = {P::kCosts.m16_tiles, P::kCosts.n8_tiles, SmallKernel<P>::kSharedBytes};
    return std::memcpy(out, found, sizeof found);
  });
}

// Of the m16 tiles and n8 tiles of a matrix in `down` x `across` tiles: the tile of an index, and
// then the share of each of its warps.
void areas(int index, int m16_tiles, int down, int n8_tiles, int across, Area* out) {
  const Area tile = tile_at(index, m16_tiles, down, n8_tiles, across);
  *out++ = tile;
  for (int warp = 0; warp < kWarps; ++warp) *out++ = warp_share(tile, warp);
}

}  // extern "C"
