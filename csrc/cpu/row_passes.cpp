#include "cpu/row_passes.h"

#include <algorithm>
#include <limits>

#include "cpu/vector_math.h"

namespace fastqt {
namespace {

// fp32 partial sums go to double after so many terms, so that long rows lose nothing.
constexpr int64_t kBlock = 1024;

template <class T>
FASTQT_INLINE T max_body(const T* x, int64_t n) {
  T largest = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < n; ++j) largest = x[j] > largest ? x[j] : largest;
  return largest;
}

template <class T>
FASTQT_INLINE double sum_body(const T* x, int64_t n) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < n; ++j) total += x[j];
  return total;
}

template <class T>
FASTQT_INLINE double exp_sum_body(const T* x, int64_t n, T reference) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = begin; j < end; ++j) part += exp_normal_(x[j] - reference);
    total += part;
  }
  return total;
}

template <class T>
FASTQT_INLINE double exp_body(T* x, int64_t n, T reference) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = begin; j < end; ++j) {
      const T e = exp_normal_(x[j] - reference);
      x[j] = e;
      part += e;
    }
    total += part;
  }
  return total;
}

// As in exp_normal_: arithmetic on subnormals, in the passes and in the matrix products that
// follow, is a hundred times slower than on zeros.
template <class T>
FASTQT_INLINE T without_subnormals(T x) {
  return std::abs(x) < std::numeric_limits<T>::min() ? T(0) : x;
}

// log(1 + exp(x)), with e = exp(-|x|), which neither overflows nor loses small results.
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
FASTQT_INLINE double sigmoid_body(T* x, int64_t n, T factor, T shift) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    T part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t j = begin; j < end; ++j) {
      const T e = exp_normal_(-std::abs(x[j]));
      part += softplus(x[j], e);
      x[j] = without_subnormals(factor * ((x[j] > 0 ? T(1) : e) / (1 + e)) - shift);
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
FASTQT_INLINE void affine_body(T* x, int64_t n, T factor, T shift) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] = without_subnormals(factor * x[j] - shift);
}

template <class T>
FASTQT_INLINE void raise_body(T* m, const T* x, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) m[j] = x[j] > m[j] ? x[j] : m[j];
}

template <class T>
FASTQT_INLINE void exp_add_body(T* sums, const T* x, const T* references, int64_t n) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) sums[j] += exp_normal_(x[j] - references[j]);
}

template <class T>
FASTQT_INLINE void two_exps_body(T* x, int64_t n, T reference, T factor, const T* references, const T* factors) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j)
    x[j] = without_subnormals(factor * exp_normal_(x[j] - reference) + factors[j] * exp_normal_(x[j] - references[j]));
}

template <class T>
FASTQT_INLINE void exclude_group_body(T* x, const int64_t* groups, int64_t n, int64_t group) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] = groups[j] == group ? -std::numeric_limits<T>::infinity() : x[j];
}

template <class T>
FASTQT_INLINE double dot_body(const T* x, const T* y, int64_t n) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < n; ++j) total += static_cast<double>(x[j]) * y[j];
  return total;
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

}  // namespace

FASTQT_CLONES float row_max(const float* x, int64_t n) { return max_body(x, n); }
FASTQT_CLONES double row_max(const double* x, int64_t n) { return max_body(x, n); }

FASTQT_CLONES double row_sum(const float* x, int64_t n) { return sum_body(x, n); }
FASTQT_CLONES double row_sum(const double* x, int64_t n) { return sum_body(x, n); }

FASTQT_CLONES double row_exp_sum(const float* x, int64_t n, float reference) { return exp_sum_body(x, n, reference); }
FASTQT_CLONES double row_exp_sum(const double* x, int64_t n, double reference) { return exp_sum_body(x, n, reference); }

FASTQT_CLONES double row_exp(float* x, int64_t n, float reference) { return exp_body(x, n, reference); }
FASTQT_CLONES double row_exp(double* x, int64_t n, double reference) { return exp_body(x, n, reference); }

FASTQT_CLONES double row_softplus_sum(const float* x, int64_t n) { return softplus_sum_body(x, n); }
FASTQT_CLONES double row_softplus_sum(const double* x, int64_t n) { return softplus_sum_body(x, n); }

FASTQT_CLONES double row_sigmoid(float* x, int64_t n, float factor, float shift) {
  return sigmoid_body(x, n, factor, shift);
}
FASTQT_CLONES double row_sigmoid(double* x, int64_t n, double factor, double shift) {
  return sigmoid_body(x, n, factor, shift);
}

FASTQT_CLONES void row_add(float* x, const float* y, int64_t n) { add_body(x, y, n); }
FASTQT_CLONES void row_add(double* x, const double* y, int64_t n) { add_body(x, y, n); }

FASTQT_CLONES void row_affine(float* x, int64_t n, float factor, float shift) { affine_body(x, n, factor, shift); }
FASTQT_CLONES void row_affine(double* x, int64_t n, double factor, double shift) { affine_body(x, n, factor, shift); }

FASTQT_CLONES void row_raise(float* m, const float* x, int64_t n) { raise_body(m, x, n); }
FASTQT_CLONES void row_raise(double* m, const double* x, int64_t n) { raise_body(m, x, n); }

FASTQT_CLONES void row_exp_add(float* sums, const float* x, const float* references, int64_t n) {
  exp_add_body(sums, x, references, n);
}
FASTQT_CLONES void row_exp_add(double* sums, const double* x, const double* references, int64_t n) {
  exp_add_body(sums, x, references, n);
}

FASTQT_CLONES void row_two_exps(float* x, int64_t n, float reference, float factor, const float* references,
                                const float* factors) {
  two_exps_body(x, n, reference, factor, references, factors);
}
FASTQT_CLONES void row_two_exps(double* x, int64_t n, double reference, double factor, const double* references,
                                const double* factors) {
  two_exps_body(x, n, reference, factor, references, factors);
}

FASTQT_CLONES void row_exclude_group(float* x, const int64_t* groups, int64_t n, int64_t group) {
  exclude_group_body(x, groups, n, group);
}
FASTQT_CLONES void row_exclude_group(double* x, const int64_t* groups, int64_t n, int64_t group) {
  exclude_group_body(x, groups, n, group);
}

FASTQT_CLONES double row_dot(const float* x, const float* y, int64_t n) { return dot_body(x, y, n); }
FASTQT_CLONES double row_dot(const double* x, const double* y, int64_t n) { return dot_body(x, y, n); }

FASTQT_CLONES void row_multiple(float* y, const float* x, int64_t n, float factor, bool add) {
  multiple_body(y, x, n, factor, add);
}
FASTQT_CLONES void row_multiple(double* y, const double* x, int64_t n, double factor, bool add) {
  multiple_body(y, x, n, factor, add);
}

}  // namespace fastqt
