// What Adam's steps without a gradient do to a row, in a few terms for any number of steps.
//
// A row whose gradient is zero still moves. From step t on, j steps later, dense Adam subtracts
//
//     lr_s b1^j / (1 - b1^s) * m / (c_j sqrt(v) + eps),   s = t + j,   c_j = sqrt(b2^j / (1 -
//     b2^s))
//
// where m and v are the moments at step t. The sum over j = 1 .. k is m times sum_j a_j / (c_j r +
// eps) with r = sqrt(v), whose a_j and c_j are the same for all elements of all rows that miss the
// same steps: schedules of lr go into a_j, and so does the decay of the steps that follow. The c_j
// differ little from each other but in the first steps of a training, so that neighbours are joined
// to one term by their mean and central moments (table_passes.h), as many as leave an error below a
// rounding. That holds for any r, so also where r is not large beside eps.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/table_passes.h"

namespace fastqt {

// The learning rate of steps first + 1, first + 2, .. and the factor 1 - lr * decay of each.
struct Rates {
  int64_t first;
  const double* values;  // (steps, 2)
  double lr(int64_t step) const { return values[2 * (step - first - 1)]; }
  double keep(int64_t step) const { return values[2 * (step - first - 1) + 1]; }
};

template <class T>
class MissedSteps {
 public:
  // For rows that are right up to a step of at least rates.first, and are to be right up to `step`.
  MissedSteps(const Rates& rates, int64_t step, double beta1, double beta2);

  // The steps that are missed by rows which are right up to step `since`.
  std::vector<Term<T>> terms(int64_t since) const;
  T keep(int64_t since) const { return static_cast<T>(keeps_[since - first_]); }
  T first_decay(int64_t since) const;
  T second_decay(int64_t since) const;

 private:
  void join(const std::vector<double>& a, const std::vector<double>& c, std::size_t begin,
            std::size_t end, double total, std::vector<Term<T>>& terms) const;

  int64_t first_, step_;
  double beta1_, beta2_;
  std::vector<double> keeps_;    // of step first + i: the product of the factors after it
  std::vector<double> weights_;  // of step first + i: lr / (1 - b1^s), times that product
  std::vector<double> roots_;    // of step first + i: 1 / sqrt(1 - b2^s)
};

}  // namespace fastqt
