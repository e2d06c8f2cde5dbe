// The one-launch kernel executed on a CPU, for ctypes.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cuda/small_kernel.cuh"

namespace {

using namespace fastqt;
using namespace fastqt::cuda;

template <class P>
std::string execute(const SmallProblem& p, int blocks, uint64_t seed) {
  return host::Grid(blocks, kThreads, SmallKernel<P>::kSharedBytes, seed).run([&] { small_kernel<P>(p); });
}

}  // namespace

// `arithmetic`: 0 for float32, 1 for tf32, 2 for bfloat16, 3 for float16. Returns "" or what went wrong.
extern "C" const char* fastqt_small_host(const SmallProblem* given, int arithmetic, int blocks, uint64_t seed) {
  SmallProblem p = *given;
  const int element_bytes = arithmetic < 2 ? 4 : 2;
  const int64_t bytes = lay_out_workspace(p, blocks, element_bytes, nullptr);
  std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(16, bytes), &std::free);
  std::memset(memory.get(), 0xff, bytes);  // NaN in every format
  lay_out_workspace(p, blocks, element_bytes, memory.get());
  static std::string error;
  switch (arithmetic) {
    case 0: error = execute<FloatArithmetic>(p, blocks, seed); break;
    case 1: error = execute<Tf32Arithmetic>(p, blocks, seed); break;
    case 2: error = execute<HalfArithmetic<bfloat16>>(p, blocks, seed); break;
    default: error = execute<HalfArithmetic<float16>>(p, blocks, seed);
  }
  return error.c_str();
}

extern "C" int fastqt_small_problem_bytes() { return sizeof(SmallProblem); }
