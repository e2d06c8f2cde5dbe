#include "cpu/missed_steps.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fastqt {
namespace {

// The part of the whole sum by which the terms may be wrong: a fraction of a rounding.
template <class T>
constexpr double kError = sizeof(T) == 8 ? 1e-17 : 1e-9;

}  // namespace

template <class T>
MissedSteps<T>::MissedSteps(const Rates& rates, int64_t step, double beta1, double beta2)
    : first_(rates.first), step_(step), beta1_(beta1), beta2_(beta2) {
  const int64_t steps = step - first_;
  keeps_.assign(steps + 1, 1.0);
  weights_.assign(steps + 1, 0.0);
  roots_.assign(steps + 1, 0.0);
  for (int64_t i = steps; i > 0; --i) {
    const auto s = static_cast<double>(first_ + i);
    weights_[i] = keeps_[i] * rates.lr(first_ + i) / (1 - std::pow(beta1, s));
    roots_[i] = 1 / std::sqrt(1 - std::pow(beta2, s));
    keeps_[i - 1] = keeps_[i] * rates.keep(first_ + i);
  }
}

template <class T>
T MissedSteps<T>::first_decay(int64_t since) const {
  return static_cast<T>(std::pow(beta1_, static_cast<double>(step_ - since)));
}

template <class T>
T MissedSteps<T>::second_decay(int64_t since) const {
  return static_cast<T>(std::pow(beta2_, static_cast<double>(step_ - since)));
}

template <class T>
std::vector<Term<T>> MissedSteps<T>::terms(int64_t since) const {
  std::vector<double> a, c;
  const double ratio = std::sqrt(beta2_);
  double first = 1, second = 1, total = 0;  // b1^j, sqrt(b2)^j
  for (int64_t i = since - first_ + 1; i <= step_ - first_; ++i) {
    first *= beta1_;
    second *= ratio;
    // What remains is below a rounding of the sum: each a_j / c_j is below the one before, times
    // this ratio, but for a learning rate that rises.
    if (first / second < kError<T> * 1e-6 && beta1_ < ratio) break;
    a.push_back(weights_[i] * first);
    c.push_back(roots_[i] * second);
    total += a.back() / c.back();
  }
  std::vector<Term<T>> joined;
  join(a, c, 0, a.size(), total, joined);
  return joined;
}

template <class T>
void MissedSteps<T>::join(const std::vector<double>& a, const std::vector<double>& c,
                          std::size_t begin, std::size_t end, double total,
                          std::vector<Term<T>>& terms) const {
  double weight = 0, mean = 0;
  for (std::size_t j = begin; j < end; ++j) weight += a[j], mean += a[j] * c[j];
  if (!(weight > 0)) return;  // without a learning rate nothing moves
  mean /= weight;

  double m2 = 0, m3 = 0, m4 = 0, sum_of_errors = 0, largest_error = 0;
  for (std::size_t j = begin; j < end; ++j) {
    const double d = c[j] - mean, square = a[j] * d * d, fifth = d * d * d * d * std::abs(d);
    m2 += square;
    m3 += square * d;
    m4 += square * d * d;
    sum_of_errors += a[j] * fifth / c[j];
    largest_error = std::max(largest_error, fifth);
  }
  // Where a_j / c_j grows with j, all depends on r: the last steps are nearly the whole sum for an
  // r that is large beside eps, and nothing of it for a small one. Then no step may be wrong by
  // more than a part of itself.
  const double error = beta1_ < std::sqrt(beta2_) ? sum_of_errors : largest_error * total;
  const double allowed = kError<T> * total * std::pow(mean, 5);
  if (end - begin == 1) {
    m2 = m3 = m4 = 0;
  } else if (!(error <= allowed)) {
    const std::size_t middle = begin + (end - begin) / 2;
    join(a, c, begin, middle, total, terms);
    join(a, c, middle, end, total, terms);
    return;
  }
  terms.push_back({static_cast<T>(mean), static_cast<T>(weight), static_cast<T>(m2),
                   static_cast<T>(m3), static_cast<T>(m4)});
}

template class MissedSteps<float>;
template class MissedSteps<double>;

}  // namespace fastqt
