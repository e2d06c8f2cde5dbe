// The elementary functions of csrc/cpu/vector_math.h over arrays, in place, in the float32 and
// float64 of each.
#pragma once

#include <cstdint>

namespace fastqt {

// Expands use(name) for the name of each function.
#define FASTQT_FOR_FUNCTIONS(use) use(exp) use(exp_normal) use(sigmoid) use(tanh) use(log1p_unit)

#define FASTQT_DECLARE(name)            \
  void map_##name(float* x, int64_t n); \
  void map_##name(double* x, int64_t n);
FASTQT_FOR_FUNCTIONS(FASTQT_DECLARE)
#undef FASTQT_DECLARE

}  // namespace fastqt
