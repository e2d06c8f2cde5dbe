// The one-launch kernel for one arithmetic, by itself: what the emulator executes.
#include "cuda/small_kernel.cuh"

namespace fastqt::cuda {
template __global__ void small_kernel<ARITHMETIC>(FASTQT_ARGUMENT SmallProblem);
}  // namespace fastqt::cuda
