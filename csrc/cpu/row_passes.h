// Vectorised passes over one row. Cells of a row of scores that must not count in a sum (exact
// cells and excluded ones) hold -inf.
#pragma once

#include <cstdint>

#include "cpu/bfloat16.h"

namespace fastqt {

// The largest of x[0..n) that is not NaN; -inf where there is none.
float row_max(const float* x, int64_t n);
double row_max(const double* x, int64_t n);

double row_sum(const float* x, int64_t n);
double row_sum(const double* x, int64_t n);

// sum_j exp(x_j - shift)
double row_exp_sum(const float* x, int64_t n, float shift);
double row_exp_sum(const double* x, int64_t n, double shift);

// x_j = exp(x_j - shift); returns their sum
double row_exp(float* x, int64_t n, float shift);
double row_exp(double* x, int64_t n, double shift);

// sum_j log(1 + exp(x_j))
double row_softplus_sum(const float* x, int64_t n);
double row_softplus_sum(const double* x, int64_t n);

// x_j = factor / (1 + exp(-x_j)) - offset; returns sum_j log(1 + exp(x_j)) of the x before
double row_sigmoid(float* x, int64_t n, float factor, float offset);
double row_sigmoid(double* x, int64_t n, double factor, double offset);

// x_j = x_j + y_j
void row_add(float* x, const float* y, int64_t n);
void row_add(double* x, const double* y, int64_t n);

// x_j = factor * x_j - offset
void row_affine(float* x, int64_t n, float factor, float offset);
void row_affine(double* x, int64_t n, double factor, double offset);

// x_j = factor * factors_j * x_j
void row_scale(float* x, const float* factors, int64_t n, float factor);
void row_scale(double* x, const double* factors, int64_t n, double factor);

// sums_j = sums_j + x_j, and x_j the same
void row_running_sum(float* sums, float* x, int64_t n);
void row_running_sum(double* sums, double* x, int64_t n);

// sums_j = sums_j + x_j y_j; returns sum_j x_j y_j
double row_product_add(float* sums, const float* x, const float* y, int64_t n);
double row_product_add(double* sums, const double* x, const double* y, int64_t n);

// m_j = max(m_j, x_j), where a NaN in x_j is ignored
void row_raise(float* m, const float* x, int64_t n);
void row_raise(double* m, const double* x, int64_t n);

// sums_j = sums_j + exp(x_j - shifts_j)
void row_exp_add(float* sums, const float* x, const float* shifts, int64_t n);
void row_exp_add(double* sums, const double* x, const double* shifts, int64_t n);

// x_j = factor * exp(x_j - shift) + factors_j * exp(x_j - shifts_j)
void row_two_exps(float* x, int64_t n, float shift, float factor, const float* shifts,
                  const float* factors);
void row_two_exps(double* x, int64_t n, double shift, double factor, const double* shifts,
                  const double* factors);

// x_j = -inf where groups[j] == group
void row_exclude_group(float* x, const int64_t* groups, int64_t n, int64_t group);
void row_exclude_group(double* x, const int64_t* groups, int64_t n, int64_t group);

// x_j = -inf where x_j > limit
void row_exclude_above(float* x, int64_t n, float limit);
void row_exclude_above(double* x, int64_t n, double limit);

// above_j = 1 where factor * factors_j * x_j > limit and 0 where it is not, or kUndecided where the
// product is not finite or within `error` of the limit; returns whether any is undecided
constexpr uint8_t kUndecided = 2;
bool row_above(const float* x, const float* factors, int64_t n, float factor, float limit,
               float error, uint8_t* above);

// sum_j x_j y_j
double row_dot(const float* x, const float* y, int64_t n);
double row_dot(const double* x, const double* y, int64_t n);

// The inner product of two rows, and those of each with itself.
struct Products {
  double xy, xx, yy;
};
Products row_products(const float* x, const float* y, int64_t n);
Products row_products(const double* x, const double* y, int64_t n);

// y_j = factor * x_j, or y_j + factor * x_j where `add` is true
void row_multiple(float* y, const float* x, int64_t n, float factor, bool add);
void row_multiple(double* y, const double* x, int64_t n, double factor, bool add);

// The same functions of rows in bfloat16.
double row_dot(const BFloat16* x, const BFloat16* y, int64_t n);
double row_dot(const BFloat16* x, const float* y, int64_t n);
void row_multiple(float* y, const BFloat16* x, int64_t n, float factor, bool add);

// y_j = factor * x_j, rounded to bfloat16
void row_round(BFloat16* y, const float* x, int64_t n, float factor = 1);
void row_round(BFloat16* y, const BFloat16* x, int64_t n, float factor);

}  // namespace fastqt
