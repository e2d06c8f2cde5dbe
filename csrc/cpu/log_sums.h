// Logarithms of sums of two exponentials, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

namespace fastqt {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The score of a positive, from which the logsumexp of the other cells is subtracted. In place of
// infinity it is NaN, as the loss is then: in log(exp(positive) + exp(others)) - positive two
// infinities cancel each other.
inline double positive_score(double x) {
  return x == kInfinity ? std::numeric_limits<double>::quiet_NaN() : x;
}

// log(1 + exp(x))
inline double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// log(exp(a) + exp(b)); NaN if a or b is NaN.
inline double log_add(double a, double b) {
  if (a == -kInfinity) return b;
  if (b == -kInfinity) return a;
  return std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
}

}  // namespace fastqt
