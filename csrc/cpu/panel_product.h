// Products of float32 matrices by fastqt's own micro-kernel (micro_kernel.h), on one thread.
#pragma once

#include <cstdint>

#include "cpu/micro_kernel.h"

namespace fastqt {

// The levels of vector instructions that there are micro-kernels for. Of one processor family, the later is the faster.
enum class Vectors : int64_t { kNone = 0, kNeon = 1, kAvx2 = 2, kAvx512 = 3 };

// The fastest that this processor has, and that this compiler could make.
Vectors best_vectors();

// out (rows, columns), whose rows are `stride` apart and have adjacent columns: factor * a b, added to it or written.
struct PanelProduct {
  float* out;
  int64_t stride;
  Strided a, b;
  int64_t rows, columns, depth;
  float factor;
  bool add;

  // The same of some of the rows and columns of `out`.
  PanelProduct part(int64_t row, int64_t row_end, int64_t column, int64_t column_end) const;
};

// Writes a product. The level is one that this processor has, and not kNone.
void multiply_panels(const PanelProduct& product, Vectors level);

}  // namespace fastqt
