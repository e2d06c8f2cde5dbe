// Vectorised passes over rows of a table that are named by their numbers.
#pragma once

#include <cstdint>

#include "cpu/bfloat16.h"

namespace fastqt {

// out_j = sum_i factors[sources[i]] * table[sources[i] * stride + j] for j < width, added up in the
// order of i. Without factors (null) each is 1.
void rows_sum(float* out, const float* table, int64_t stride, const int64_t* sources,
              const float* factors, int64_t n, int64_t width);
void rows_sum(double* out, const double* table, int64_t stride, const int64_t* sources,
              const double* factors, int64_t n, int64_t width);
void rows_sum(float* out, const BFloat16* table, int64_t stride, const int64_t* sources,
              const float* factors, int64_t n, int64_t width);

}  // namespace fastqt
