// Built once for each x86 level by test_vector_functions.py.
#include "vector_functions.h"

#include "cpu/vector_math.h"

namespace fastqt {
namespace {

template <class T, class F>
FASTQT_INLINE void map(T* x, int64_t n, F function) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] = function(x[j]);
}

}  // namespace

#define FASTQT_DEFINE(name)                                                      \
  FASTQT_CLONES void map_##name(float* x, int64_t n) {                           \
    map(x, n, [](float value) FASTQT_ALWAYS_INLINE { return name##_(value); });  \
  }                                                                              \
  FASTQT_CLONES void map_##name(double* x, int64_t n) {                          \
    map(x, n, [](double value) FASTQT_ALWAYS_INLINE { return name##_(value); }); \
  }
FASTQT_FOR_FUNCTIONS(FASTQT_DEFINE)

}  // namespace fastqt
