#include "small_host.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "cuda/small_kernel.cuh"

namespace fastqt::host {

using namespace cuda;

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

std::string run(SmallProblem problem, const std::string& arithmetic, int blocks, uint64_t seed) {
  return with_arithmetic(arithmetic, [&]<class P>(P) {
    constexpr int kElementBytes = sizeof(typename P::Value);
    if (problem.tiles.splits == 0) problem.tiles = choose_tiles(problem, P::kCosts, blocks);
    const int64_t bytes = lay_out_workspace(problem, kElementBytes, nullptr);
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(16, bytes),
                                                             &std::free);
    std::memset(memory.get(), 0xff, bytes);  // NaN in every format
    lay_out_workspace(problem, kElementBytes, memory.get());
    return Grid(blocks, kThreads, SmallKernel<P>::kSharedBytes, seed).run([&] {
      small_kernel<P>(problem);
    });
  });
}

Tiles chosen_tiles(const SmallProblem& problem, const std::string& arithmetic, int blocks) {
  return with_arithmetic(arithmetic,
                         [&]<class P>(P) { return choose_tiles(problem, P::kCosts, blocks); });
}

TileCosts tile_costs(const std::string& arithmetic) {
  return with_arithmetic(arithmetic, []<class P>(P) { return P::kCosts; });
}

int shared_bytes(const std::string& arithmetic) {
  return with_arithmetic(arithmetic, []<class P>(P) { return int{SmallKernel<P>::kSharedBytes}; });
}

std::vector<Area> areas(int index, int m16_tiles, int down, int n8_tiles, int across) {
  std::vector<Area> found{tile_at(index, m16_tiles, down, n8_tiles, across)};
  for (int warp = 0; warp < kWarps; ++warp) found.push_back(warp_share(found.front(), warp));
  return found;
}

}  // namespace fastqt::host
