// Vectorised passes over one row. In a row of scores, cells that they must not see (targets,
// replaced or excluded ones) hold -inf.
#pragma once

#include <cstdint>

namespace fastqt {

// The largest of x[0..n), NaNs apart; -inf where there is none.
float row_max(const float* x, int64_t n);
double row_max(const double* x, int64_t n);

double row_sum(const float* x, int64_t n);
double row_sum(const double* x, int64_t n);

// sum_j exp(x_j - reference)
double row_exp_sum(const float* x, int64_t n, float reference);
double row_exp_sum(const double* x, int64_t n, double reference);

// x_j = exp(x_j - reference), and their sum
double row_exp(float* x, int64_t n, float reference);
double row_exp(double* x, int64_t n, double reference);

// sum_j log(1 + exp(x_j))
double row_softplus_sum(const float* x, int64_t n);
double row_softplus_sum(const double* x, int64_t n);

// x_j = factor / (1 + exp(-x_j)) - shift, and sum_j log(1 + exp(x_j)) of what x was
double row_sigmoid(float* x, int64_t n, float factor, float shift);
double row_sigmoid(double* x, int64_t n, double factor, double shift);

// x_j = x_j + y_j
void row_add(float* x, const float* y, int64_t n);
void row_add(double* x, const double* y, int64_t n);

// x_j = factor * x_j - shift
void row_affine(float* x, int64_t n, float factor, float shift);
void row_affine(double* x, int64_t n, double factor, double shift);

// m_j = max(m_j, x_j), NaNs apart
void row_raise(float* m, const float* x, int64_t n);
void row_raise(double* m, const double* x, int64_t n);

// sums_j = sums_j + exp(x_j - references_j)
void row_exp_add(float* sums, const float* x, const float* references, int64_t n);
void row_exp_add(double* sums, const double* x, const double* references, int64_t n);

// x_j = factor * exp(x_j - reference) + factors_j * exp(x_j - references_j)
void row_two_exps(float* x, int64_t n, float reference, float factor, const float* references, const float* factors);
void row_two_exps(double* x, int64_t n, double reference, double factor, const double* references,
                  const double* factors);

// x_j = -inf where groups[j] == group
void row_exclude_group(float* x, const int64_t* groups, int64_t n, int64_t group);
void row_exclude_group(double* x, const int64_t* groups, int64_t n, int64_t group);

// sum_j x_j y_j
double row_dot(const float* x, const float* y, int64_t n);
double row_dot(const double* x, const double* y, int64_t n);

// y_j = factor * x_j, or added to what is there
void row_multiple(float* y, const float* x, int64_t n, float factor, bool add);
void row_multiple(double* y, const double* x, int64_t n, double factor, bool add);

}  // namespace fastqt
