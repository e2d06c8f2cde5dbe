// The one-launch kernel executed on a CPU, for ctypes.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cuda/small_kernel.cuh"

namespace {

using namespace fastqt;
using namespace fastqt::cuda;

// Calls visit(arithmetic) for that of a number: 0 for float32, 1 for tf32, 2 for bfloat16, 3 for float16.
template <class F>
auto with_arithmetic(int number, const F& visit) {
  switch (number) {
    case 0: return visit(FloatArithmetic{});
    case 1: return visit(Tf32Arithmetic{});
    case 2: return visit(HalfArithmetic<bfloat16>{});
    default: return visit(HalfArithmetic<float16>{});
  }
}

}  // namespace

// Returns "" or what went wrong.
extern "C" const char* fastqt_small_host(const SmallProblem* given, int arithmetic, int blocks, uint64_t seed) {
  static std::string error;
  error = with_arithmetic(arithmetic, [&]<class P>(P) {
    constexpr int kElementBytes = sizeof(typename P::Value);
    SmallProblem p = *given;
    if (p.tiles.splits == 0) p.tiles = choose_tiles(p, P::kCosts, blocks);
    const int64_t bytes = lay_out_workspace(p, kElementBytes, nullptr);
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(16, bytes), &std::free);
    std::memset(memory.get(), 0xff, bytes);  // NaN in every format
    lay_out_workspace(p, kElementBytes, memory.get());
    return host::Grid(blocks, kThreads, SmallKernel<P>::kSharedBytes, seed).run([&] { small_kernel<P>(p); });
  });
  return error.c_str();
}

// Chooses the problem's tiles, as for so many blocks.
extern "C" void fastqt_small_tiles(SmallProblem* p, int arithmetic, int blocks) {
  with_arithmetic(arithmetic, [&]<class P>(P) { p->tiles = choose_tiles(*p, P::kCosts, blocks); });
}
// Of strips x eights, the tile of an index and each of its warps' shares, as four numbers each.
extern "C" void fastqt_small_areas(int index, int strips, int down, int eights, int across, Area* tile, Area* shares) {
  *tile = tile_at(index, strips, down, eights, across);
  for (int warp = 0; warp < kWarps; ++warp) shares[warp] = warp_share(*tile, warp);
}
extern "C" void fastqt_small_most(int arithmetic, int* strips, int* eights) {
  with_arithmetic(arithmetic, [&]<class P>(P) { *strips = P::kCosts.strips, *eights = P::kCosts.eights; });
}

extern "C" int fastqt_small_shared_bytes(int arithmetic) {
  return with_arithmetic(arithmetic, []<class P>(P) { return SmallKernel<P>::kSharedBytes; });
}
extern "C" int fastqt_small_problem_bytes() { return sizeof(SmallProblem); }
