#include "cpu/table_passes.h"

#include <algorithm>
#include <cmath>

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

template <class T>
FASTQT_INLINE void adam_row_body(T* p, T* m, T* v, const T* g, const AdamStep<T>& step,
                                 int64_t width) {
  const T first_share = step.first_share, second_keep = step.second_keep,
          second_share = step.second_share, eps = step.eps, sign = step.sign, l2 = step.l2,
          keep = step.keep, size = step.size, root_correction = step.root_correction;
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    const T gradient = sign * g[j] + l2 * p[j];
    const T first = m[j] + first_share * (gradient - m[j]);
    const T second = second_keep * v[j] + second_share * gradient * gradient;
    m[j] = first;
    v[j] = second;
    p[j] = keep * p[j] - size * first / (std::sqrt(second) / root_correction + eps);
  }
}

template <class T>
FASTQT_INLINE void replay_row_body(T* p, T* m, T* v, const Missed<T>& missed, T eps, int64_t width,
                                   bool moments) {
  constexpr int64_t kBlock = 64;
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t n = std::min(kBlock, width - begin);
    T root[kBlock], sum[kBlock];
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      root[j] = std::sqrt(v[begin + j]);
      sum[j] = 0;
    }
    for (int64_t i = 0; i < missed.count; ++i) {
      const Term<T> term = missed.terms[i];
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const T y = 1 / (term.c * root[j] + eps), z = root[j] * y;
        sum[j] += y * (term.m0 + z * z * (term.m2 - z * (term.m3 - z * term.m4)));
      }
    }

#pragma omp simd
    for (int64_t j = 0; j < n; ++j)
      p[begin + j] = missed.keep * p[begin + j] - m[begin + j] * sum[j];
    if (!moments) continue;
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      m[begin + j] = without_subnormals(missed.first_decay * m[begin + j]);
      v[begin + j] = without_subnormals(missed.second_decay * v[begin + j]);
    }
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

FASTQT_CLONES void adam_row(float* p, float* m, float* v, const float* g,
                            const AdamStep<float>& step, int64_t width) {
  adam_row_body(p, m, v, g, step, width);
}
FASTQT_CLONES void adam_row(double* p, double* m, double* v, const double* g,
                            const AdamStep<double>& step, int64_t width) {
  adam_row_body(p, m, v, g, step, width);
}

FASTQT_CLONES void replay_row(float* p, float* m, float* v, const Missed<float>& missed, float eps,
                              int64_t width, bool moments) {
  replay_row_body(p, m, v, missed, eps, width, moments);
}
FASTQT_CLONES void replay_row(double* p, double* m, double* v, const Missed<double>& missed,
                              double eps, int64_t width, bool moments) {
  replay_row_body(p, m, v, missed, eps, width, moments);
}

}  // namespace fastqt
