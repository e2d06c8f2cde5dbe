#include "cpu/row_passes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/vector_math.h"

namespace fastqt {
namespace {

// After this many terms, a sum in fp32 is added to one in double, so that the error does not grow
// with the row.
constexpr int64_t kBlock = 1024;

template <class T>
FASTQT_INLINE T max_body(const T* x, int64_t n) {
  // A maximum for each lane of a few vectors, since clang does not vectorise one that ignores NaN
  // over the whole row.
  constexpr int64_t kLanes = 128 / sizeof(T);
  T largest[kLanes];
  std::fill_n(largest, kLanes, -std::numeric_limits<T>::infinity());
  const int64_t whole = n - n % kLanes;
  for (int64_t begin = 0; begin < whole; begin += kLanes) {
#pragma omp simd
    for (int64_t l = 0; l < kLanes; ++l)
      largest[l] = x[begin + l] > largest[l] ? x[begin + l] : largest[l];
  }
  for (int64_t l = 0; l < n - whole; ++l)
    largest[l] = x[whole + l] > largest[l] ? x[whole + l] : largest[l];
  return *std::max_element(largest, largest + kLanes);
}

template <class T>
FASTQT_INLINE double sum_body(const T* x, int64_t n) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < n; ++j) total += x[j];
  return total;
}

template <class T>
FASTQT_INLINE double exp_sum_body(const T* x, int64_t n, T shift) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = begin; j < end; ++j) part += exp_normal_(x[j] - shift);
    total += part;
  }
  return total;
}

template <class T>
FASTQT_INLINE double exp_body(T* x, int64_t n, T shift) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = begin; j < end; ++j) {
      const T e = exp_normal_(x[j] - shift);
      x[j] = e;
      part += e;
    }
    total += part;
  }
  return total;
}

// log(1 + exp(x)) from e = exp(-|x|), a form that does not overflow and keeps the digits of small
// results.
template <class T>
FASTQT_INLINE T softplus(T x, T e) {
  return (x > 0 ? x : T(0)) + log1p_unit_(e);
}

template <class T>
FASTQT_INLINE double softplus_sum_body(const T* x, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = begin; j < end; ++j) part += softplus(x[j], exp_normal_(-std::abs(x[j])));
    total += part;
  }
  return total;
}

template <class T>
FASTQT_INLINE double sigmoid_body(T* x, int64_t n, T factor, T offset) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = begin; j < end; ++j) {
      const T e = exp_normal_(-std::abs(x[j]));
      part += softplus(x[j], e);
      x[j] = without_subnormals(factor * ((x[j] > 0 ? T(1) : e) / (1 + e)) - offset);
    }
    total += part;
  }
  return total;
}

template <class T>
FASTQT_INLINE void add_body(T* x, const T* y, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] += y[j];
}

template <class T>
FASTQT_INLINE void affine_body(T* x, int64_t n, T factor, T offset) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] = without_subnormals(factor * x[j] - offset);
}

template <class T>
FASTQT_INLINE void scale_body(T* x, const T* factors, int64_t n, T factor) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] = without_subnormals(factor * factors[j] * x[j]);
}

template <class T>
FASTQT_INLINE void running_sum_body(T* sums, T* x, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    sums[j] += x[j];
    x[j] = sums[j];
  }
}

template <class T>
FASTQT_INLINE double product_add_body(T* sums, const T* x, const T* y, int64_t n) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < n; ++j) {
    sums[j] += x[j] * y[j];
    total += static_cast<double>(x[j]) * y[j];
  }
  return total;
}

template <class T>
FASTQT_INLINE void raise_body(T* m, const T* x, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) m[j] = x[j] > m[j] ? x[j] : m[j];
}

template <class T>
FASTQT_INLINE void exp_add_body(T* sums, const T* x, const T* shifts, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) sums[j] += exp_normal_(x[j] - shifts[j]);
}

template <class T>
FASTQT_INLINE void two_exps_body(T* x, int64_t n, T shift, T factor, const T* shifts,
                                 const T* factors) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j)
    x[j] = without_subnormals(factor * exp_normal_(x[j] - shift) +
                              factors[j] * exp_normal_(x[j] - shifts[j]));
}

template <class T>
FASTQT_INLINE void exclude_group_body(T* x, const int64_t* groups, int64_t n, int64_t group) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j)
    x[j] = groups[j] == group ? -std::numeric_limits<T>::infinity() : x[j];
}

template <class T>
FASTQT_INLINE void exclude_above_body(T* x, int64_t n, T limit) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] = x[j] > limit ? -std::numeric_limits<T>::infinity() : x[j];
}

template <class T>
FASTQT_INLINE double dot_body(const T* x, const T* y, int64_t n) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < n; ++j) total += static_cast<double>(x[j]) * y[j];
  return total;
}

template <class T>
FASTQT_INLINE Products products_body(const T* x, const T* y, int64_t n) {
  double xy = 0, xx = 0, yy = 0;
#pragma omp simd reduction(+ : xy, xx, yy)
  for (int64_t j = 0; j < n; ++j) {
    const double a = x[j], b = y[j];
    xy += a * b, xx += a * a, yy += b * b;
  }
  return {xy, xx, yy};
}

template <class T>
FASTQT_INLINE void multiple_body(T* y, const T* x, int64_t n, T factor, bool add) {
  if (add) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) y[j] += factor * x[j];
  } else {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) y[j] = factor * x[j];
  }
}

template <class X, class Y>
FASTQT_INLINE double dot_in_blocks(const X* x, const Y* y, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = begin; j < end; ++j)
      part += static_cast<float>(x[j]) * static_cast<float>(y[j]);
    total += part;
  }
  return total;
}

FASTQT_INLINE void multiple_body(float* y, const BFloat16* x, int64_t n, float factor, bool add) {
  if (add) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) y[j] += factor * static_cast<float>(x[j]);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) y[j] = factor * static_cast<float>(x[j]);
  }
}

template <class X>
FASTQT_INLINE void round_body(BFloat16* y, const X* x, int64_t n, float factor) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) y[j].bits = BFloat16(factor * static_cast<float>(x[j])).bits;
}

}  // namespace

FASTQT_CLONES float row_max(const float* x, int64_t n) { return max_body(x, n); }
FASTQT_CLONES double row_max(const double* x, int64_t n) { return max_body(x, n); }

FASTQT_CLONES double row_sum(const float* x, int64_t n) { return sum_body(x, n); }
FASTQT_CLONES double row_sum(const double* x, int64_t n) { return sum_body(x, n); }

FASTQT_CLONES double row_exp_sum(const float* x, int64_t n, float shift) {
  return exp_sum_body(x, n, shift);
}
FASTQT_CLONES double row_exp_sum(const double* x, int64_t n, double shift) {
  return exp_sum_body(x, n, shift);
}

FASTQT_CLONES double row_exp(float* x, int64_t n, float shift) { return exp_body(x, n, shift); }
FASTQT_CLONES double row_exp(double* x, int64_t n, double shift) { return exp_body(x, n, shift); }

FASTQT_CLONES double row_softplus_sum(const float* x, int64_t n) { return softplus_sum_body(x, n); }
FASTQT_CLONES double row_softplus_sum(const double* x, int64_t n) {
  return softplus_sum_body(x, n);
}

FASTQT_CLONES double row_sigmoid(float* x, int64_t n, float factor, float offset) {
  return sigmoid_body(x, n, factor, offset);
}
FASTQT_CLONES double row_sigmoid(double* x, int64_t n, double factor, double offset) {
  return sigmoid_body(x, n, factor, offset);
}

FASTQT_CLONES void row_add(float* x, const float* y, int64_t n) { add_body(x, y, n); }
FASTQT_CLONES void row_add(double* x, const double* y, int64_t n) { add_body(x, y, n); }

FASTQT_CLONES void row_affine(float* x, int64_t n, float factor, float offset) {
  affine_body(x, n, factor, offset);
}
FASTQT_CLONES void row_affine(double* x, int64_t n, double factor, double offset) {
  affine_body(x, n, factor, offset);
}

FASTQT_CLONES void row_scale(float* x, const float* factors, int64_t n, float factor) {
  scale_body(x, factors, n, factor);
}
FASTQT_CLONES void row_scale(double* x, const double* factors, int64_t n, double factor) {
  scale_body(x, factors, n, factor);
}

FASTQT_CLONES void row_running_sum(float* sums, float* x, int64_t n) {
  running_sum_body(sums, x, n);
}
FASTQT_CLONES void row_running_sum(double* sums, double* x, int64_t n) {
  running_sum_body(sums, x, n);
}

FASTQT_CLONES double row_product_add(float* sums, const float* x, const float* y, int64_t n) {
  return product_add_body(sums, x, y, n);
}
FASTQT_CLONES double row_product_add(double* sums, const double* x, const double* y, int64_t n) {
  return product_add_body(sums, x, y, n);
}

FASTQT_CLONES void row_raise(float* m, const float* x, int64_t n) { raise_body(m, x, n); }
FASTQT_CLONES void row_raise(double* m, const double* x, int64_t n) { raise_body(m, x, n); }

FASTQT_CLONES void row_exp_add(float* sums, const float* x, const float* shifts, int64_t n) {
  exp_add_body(sums, x, shifts, n);
}
FASTQT_CLONES void row_exp_add(double* sums, const double* x, const double* shifts, int64_t n) {
  exp_add_body(sums, x, shifts, n);
}

FASTQT_CLONES void row_two_exps(float* x, int64_t n, float shift, float factor, const float* shifts,
                                const float* factors) {
  two_exps_body(x, n, shift, factor, shifts, factors);
}
FASTQT_CLONES void row_two_exps(double* x, int64_t n, double shift, double factor,
                                const double* shifts, const double* factors) {
  two_exps_body(x, n, shift, factor, shifts, factors);
}

FASTQT_CLONES void row_exclude_group(float* x, const int64_t* groups, int64_t n, int64_t group) {
  exclude_group_body(x, groups, n, group);
}
FASTQT_CLONES void row_exclude_group(double* x, const int64_t* groups, int64_t n, int64_t group) {
  exclude_group_body(x, groups, n, group);
}

FASTQT_CLONES void row_exclude_above(float* x, int64_t n, float limit) {
  exclude_above_body(x, n, limit);
}
FASTQT_CLONES void row_exclude_above(double* x, int64_t n, double limit) {
  exclude_above_body(x, n, limit);
}

FASTQT_CLONES bool row_above(const float* x, const float* factors, int64_t n, float factor,
                             float limit, float error, uint8_t* above) {
  uint8_t found = 0;
#pragma omp simd reduction(| : found)
  for (int64_t j = 0; j < n; ++j) {
    const float product = factor * (factors[j] * x[j]), distance = product - limit;
    // Comparisons are false for a NaN, which is undecided.
    const bool is_decided =
        std::abs(distance) > error && std::abs(product) < std::numeric_limits<float>::infinity();
    const uint8_t result = is_decided ? static_cast<uint8_t>(distance > 0) : kUndecided;
    above[j] = result;
    found |= result;
  }
  return (found & kUndecided) != 0;
}

FASTQT_CLONES double row_dot(const float* x, const float* y, int64_t n) {
  return dot_body(x, y, n);
}
FASTQT_CLONES double row_dot(const double* x, const double* y, int64_t n) {
  return dot_body(x, y, n);
}

FASTQT_CLONES Products row_products(const float* x, const float* y, int64_t n) {
  return products_body(x, y, n);
}
FASTQT_CLONES Products row_products(const double* x, const double* y, int64_t n) {
  return products_body(x, y, n);
}

FASTQT_CLONES void row_multiple(float* y, const float* x, int64_t n, float factor, bool add) {
  multiple_body(y, x, n, factor, add);
}
FASTQT_CLONES void row_multiple(double* y, const double* x, int64_t n, double factor, bool add) {
  multiple_body(y, x, n, factor, add);
}

FASTQT_CLONES double row_dot(const BFloat16* x, const BFloat16* y, int64_t n) {
  return dot_in_blocks(x, y, n);
}
FASTQT_CLONES double row_dot(const BFloat16* x, const float* y, int64_t n) {
  return dot_in_blocks(x, y, n);
}

FASTQT_CLONES void row_multiple(float* y, const BFloat16* x, int64_t n, float factor, bool add) {
  multiple_body(y, x, n, factor, add);
}

FASTQT_CLONES void row_round(BFloat16* y, const float* x, int64_t n, float factor) {
  round_body(y, x, n, factor);
}
FASTQT_CLONES void row_round(BFloat16* y, const BFloat16* x, int64_t n, float factor) {
  round_body(y, x, n, factor);
}

}  // namespace fastqt
