// The row passes and elementary functions of csrc/cpu with C names: built once for each x86 level by test_paths.py.
#include "cpu/row_passes.h"
#include "cpu/vector_math.h"

namespace {

template <class T, class F>
FASTQT_INLINE void map(T* x, int64_t n, F function) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) x[j] = function(x[j]);
}

}  // namespace

#define MAP(name, T, suffix)                                                                    \
  FASTQT_CLONES void name##suffix(T* x, int64_t n) {                                            \
    map(x, n, [](T value) FASTQT_ALWAYS_INLINE { return fastqt::name##_(value); });             \
  }

#define PASSES(T, suffix)                                                                                          \
  MAP(exp, T, suffix)                                                                                              \
  MAP(exp_normal, T, suffix)                                                                                       \
  MAP(sigmoid, T, suffix)                                                                                          \
  MAP(tanh, T, suffix)                                                                                             \
  MAP(log1p_unit, T, suffix)                                                                                       \
  T row_max##suffix(const T* x, int64_t n) { return fastqt::row_max(x, n); }                                       \
  double row_sum##suffix(const T* x, int64_t n) { return fastqt::row_sum(x, n); }                                  \
  double row_exp_sum##suffix(const T* x, int64_t n, T reference) { return fastqt::row_exp_sum(x, n, reference); }  \
  double row_exp##suffix(T* x, int64_t n, T reference) { return fastqt::row_exp(x, n, reference); }                \
  double row_softplus_sum##suffix(const T* x, int64_t n) { return fastqt::row_softplus_sum(x, n); }                \
  double row_sigmoid##suffix(T* x, int64_t n, T factor, T shift) { return fastqt::row_sigmoid(x, n, factor, shift); } \
  void row_add##suffix(T* x, const T* y, int64_t n) { fastqt::row_add(x, y, n); }                                  \
  void row_affine##suffix(T* x, int64_t n, T factor, T shift) { fastqt::row_affine(x, n, factor, shift); }         \
  void row_raise##suffix(T* m, const T* x, int64_t n) { fastqt::row_raise(m, x, n); }                              \
  void row_exp_add##suffix(T* sums, const T* x, const T* references, int64_t n) {                                  \
    fastqt::row_exp_add(sums, x, references, n);                                                                   \
  }                                                                                                                \
  void row_two_exps##suffix(T* x, const T* references, const T* factors, int64_t n, T reference, T factor) {       \
    fastqt::row_two_exps(x, n, reference, factor, references, factors);                                            \
  }                                                                                                                \
  void row_exclude_group##suffix(T* x, const int64_t* groups, int64_t n, int64_t group) {                          \
    fastqt::row_exclude_group(x, groups, n, group);                                                                \
  }                                                                                                                \
  double row_dot##suffix(const T* x, const T* y, int64_t n) { return fastqt::row_dot(x, y, n); }                   \
  void row_multiple##suffix(T* y, const T* x, int64_t n, T factor, bool add) { fastqt::row_multiple(y, x, n, factor, add); }

extern "C" {
PASSES(float, _float32)
PASSES(double, _float64)
}
