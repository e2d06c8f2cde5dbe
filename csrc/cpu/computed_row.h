// A row of a matrix in the dtype of the computation: the row itself, or of bfloat16 a copy in
// float32.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/dtypes.h"
#include "cpu/row_passes.h"

namespace fastqt {

template <class S>
class ComputedRow {
 public:
  using T = Computed<S>;

  explicit ComputedRow(int64_t width) : copy_(kRounds<S> ? width : 0) {}

  T* read(S* row, int64_t width) {
    if constexpr (kRounds<S>) {
      row_multiple(copy_.data(), row, width, 1, false);
      return copy_.data();
    } else {
      return row;
    }
  }

  void write(S* row, int64_t width) const {
    if constexpr (kRounds<S>) row_round(row, copy_.data(), width);
  }

 private:
  std::vector<T> copy_;
};

}  // namespace fastqt
