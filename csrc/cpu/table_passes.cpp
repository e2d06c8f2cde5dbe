#include "cpu/table_passes.h"

#include <algorithm>

#include "cpu/vector_math.h"

namespace fastqt {
namespace {

template <class T, class S>
FASTQT_INLINE void rows_sum_body(T* out, const S* table, int64_t stride, const int64_t* sources,
                                 const T* factors, int64_t n, int64_t width) {
  const auto row = [&](int64_t i) FASTQT_ALWAYS_INLINE { return table + sources[i] * stride; };
  const auto factor = [&](int64_t i) FASTQT_ALWAYS_INLINE {
    return factors == nullptr ? T(1) : factors[sources[i]];
  };

  std::fill_n(out, width, T(0));
  int64_t i = 0;
  // Four rows at a time: the sums are then loaded and stored once for four additions.
  for (; i + 4 <= n; i += 4) {
    const S *a = row(i), *b = row(i + 1), *c = row(i + 2), *d = row(i + 3);
    const T fa = factor(i), fb = factor(i + 1), fc = factor(i + 2), fd = factor(i + 3);
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      T sum = out[j] + fa * static_cast<T>(a[j]);
      sum += fb * static_cast<T>(b[j]);
      sum += fc * static_cast<T>(c[j]);
      out[j] = sum + fd * static_cast<T>(d[j]);
    }
  }
  for (; i < n; ++i) {
    const S* a = row(i);
    const T fa = factor(i);
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) out[j] += fa * static_cast<T>(a[j]);
  }
}

}  // namespace

FASTQT_CLONES void rows_sum(float* out, const float* table, int64_t stride, const int64_t* sources,
                            const float* factors, int64_t n, int64_t width) {
  rows_sum_body(out, table, stride, sources, factors, n, width);
}
FASTQT_CLONES void rows_sum(double* out, const double* table, int64_t stride,
                            const int64_t* sources, const double* factors, int64_t n,
                            int64_t width) {
  rows_sum_body(out, table, stride, sources, factors, n, width);
}
FASTQT_CLONES void rows_sum(float* out, const BFloat16* table, int64_t stride,
                            const int64_t* sources, const float* factors, int64_t n,
                            int64_t width) {
  rows_sum_body(out, table, stride, sources, factors, n, width);
}

}  // namespace fastqt
