// Parallel loops on the threads of torch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace fastqt {

// Calls visit(begin, end) on several threads, for parts of [0, size). An item costs `cells_each`
// cells, and a part has enough items that its work outweighs the cost of starting a thread on it.
template <class F>
void in_parallel(int64_t size, int64_t cells_each, const F& visit) {
  constexpr int64_t kCellsPerTask = 16384;
  const int64_t grain = std::max<int64_t>(1, kCellsPerTask / std::max<int64_t>(1, cells_each));
  torch::stable::parallel_for(0, size, grain, visit);
}

}  // namespace fastqt
