// Loops shared out among torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace fastqt {

// Calls visit(begin, end) for parts of [0, size), each worth a thread's while at so many cells an item.
template <class F>
void in_parallel(int64_t size, int64_t cells_each, const F& visit) {
  constexpr int64_t kCellsPerTask = 16384;
  const int64_t grain = std::max<int64_t>(1, kCellsPerTask / std::max<int64_t>(1, cells_each));
  torch::stable::parallel_for(0, size, grain, visit);
}

}  // namespace fastqt
