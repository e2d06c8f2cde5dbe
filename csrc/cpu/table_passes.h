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

// The scalars of Adam's step for one row.
template <class T>
struct AdamStep {
  T first_share;   // of the gradient in the first moment, 1 - beta1
  T second_keep;   // of the second moment, beta2
  T second_share;  // of the squared gradient, 1 - beta2, which a rounded beta2 would not give
  T eps;
  T sign;             // of the gradient: -1 to maximise
  T l2;               // what is added of the row to its gradient
  T keep;             // the factor of the row, 1 but for a decoupled decay
  T size;             // lr / (1 - beta1^t)
  T root_correction;  // sqrt(1 - beta2^t)
};

// Adam's step of a row p with the moments m and v and the gradient g.
void adam_row(float* p, float* m, float* v, const float* g, const AdamStep<float>& step,
              int64_t width);
void adam_row(double* p, double* m, double* v, const double* g, const AdamStep<double>& step,
              int64_t width);

// Some steps of Adam without a gradient, as terms of a sum: sum_j a_j / (c_j r + eps) is
// y (m0 + z^2 (m2 - z (m3 - z m4))) with y = 1 / (c r + eps) and z = r y, where c is the mean of
// the c_j with weights a_j, and mn the sum of a_j (c_j - c)^n.
template <class T>
struct Term {
  T c, m0, m2, m3, m4;
};

template <class T>
struct Missed {
  const Term<T>* terms;
  int64_t count;
  T keep, first_decay, second_decay;  // the factors of the row and of its moments
};

// p = keep p - m sum(sqrt(v)); where `moments` is true, m and v decay as well.
void replay_row(float* p, float* m, float* v, const Missed<float>& missed, float eps, int64_t width,
                bool moments);
void replay_row(double* p, double* m, double* v, const Missed<double>& missed, double eps,
                int64_t width, bool moments);

}  // namespace fastqt
