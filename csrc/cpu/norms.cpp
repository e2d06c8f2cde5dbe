#include "cpu/norms.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/computed_row.h"
#include "cpu/parallel.h"
#include "cpu/row_passes.h"

namespace fastqt {
namespace {

// Products of two rows of this norm, multiplied by the inverse of both, stay far from the ends of
// the dtype's range.
template <class T>
constexpr double kMostNorm = sizeof(T) == 8 ? 0x1p200 : 0x1p26;

// Rows with adjacent elements in the dtype of the computation, one at a time: a row of another
// layout or of bfloat16 is copied.
template <class S>
class Reader {
 public:
  using T = Computed<S>;

  explicit Reader(const Tensor& matrix) : rows_(matrix), stride_(matrix.stride(1)) {
    if (kRounds<S> || stride_ != 1) copy_.resize(rows_.width);
  }

  const T* operator[](int64_t row) {
    if constexpr (!kRounds<S>)
      if (stride_ == 1) return rows_[row];
    for (int64_t d = 0; d < rows_.width; ++d) copy_[d] = rows_[row][d * stride_];
    return copy_.data();
  }

 private:
  const RowsOf<S> rows_;
  const int64_t stride_;
  std::vector<T> copy_;
};

template <class T>
double norm(const T* x, int64_t n) {
  const double squares = row_dot(x, x, n);
  if (squares != std::numeric_limits<double>::infinity()) return std::sqrt(squares);
  double largest = 0;
  for (int64_t d = 0; d < n; ++d) largest = std::max(largest, std::abs(static_cast<double>(x[d])));
  if (largest == std::numeric_limits<double>::infinity()) return largest;
  double relative = 0;
  for (int64_t d = 0; d < n; ++d) relative += (x[d] / largest) * (x[d] / largest);
  return largest * std::sqrt(relative);
}

}  // namespace

template <class S>
UnitRows<S>::UnitRows(const Tensor& matrix)
    : rows_(matrix), inverse_norms_(matrix.size(0)), unrounded_inverse_norms_(matrix.size(0)) {
  const int64_t D = matrix.size(1);
  std::vector<double> norms(inverse_norms_.size());
  in_parallel(matrix.size(0), D, [&](int64_t begin, int64_t end) {
    Reader<S> rows(matrix);
    for (int64_t i = begin; i < end; ++i) norms[i] = norm(rows[i], D);
  });
  if (std::any_of(norms.begin(), norms.end(), [](double x) { return x > kMostNorm<T>; }))
    scale_rows(norms);
  for (std::size_t i = 0; i < norms.size(); ++i) {
    const double scaled = exponents_.empty() ? norms[i] : std::ldexp(norms[i], exponents_[i]);
    // A NaN stays: the comparison is false for it.
    unrounded_inverse_norms_[i] = 1 / (scaled < kLeastNorm ? kLeastNorm : scaled);
    inverse_norms_[i] = static_cast<T>(unrounded_inverse_norms_[i]);
  }
}

template <class S>
void UnitRows<S>::scale_rows(const std::vector<double>& norms) {
  const Tensor scaled = new_matrix(rows_, rows_.size(0), rows_.size(1));
  exponents_.resize(norms.size());
  in_parallel(rows_.size(0), rows_.size(1), [&](int64_t begin, int64_t end) {
    Reader<S> from(rows_);
    const RowsOf<S> to(scaled);
    for (int64_t i = begin; i < end; ++i) {
      exponents_[i] =
          norms[i] > kMostNorm<T> && std::isfinite(norms[i]) ? -std::ilogb(norms[i]) : 0;
      const T* const row = from[i];
      for (int64_t d = 0; d < to.width; ++d)
        to[i][d] = static_cast<S>(std::ldexp(row[d], exponents_[i]));
    }
  });
  rows_ = scaled;
}

template <class S>
void UnitRows<S>::finish_gradient(const Tensor& gradient) const {
  constexpr auto kLargestInverse = static_cast<T>(1 / kLeastNorm);

  in_parallel(rows_.size(0), rows_.size(1), [&](int64_t begin, int64_t end) {
    Reader<S> rows(rows_);
    const RowsOf<S> gradients(gradient);
    ComputedRow<S> computed(gradients.width);
    for (int64_t i = begin; i < end; ++i) {
      const double inverse = inverse_norms_[i];
      // A row of the least norm is divided by a constant, so that its gradient has a part along the
      // row.
      const bool has_norm = inverse < kLargestInverse,
                 was_scaled = !exponents_.empty() && exponents_[i] != 0;
      if (!has_norm && !was_scaled) continue;

      T* const dx = computed.read(gradients[i], gradients.width);
      if (has_norm) {
        const T* const x = rows[i];
        const double along = row_dot(x, dx, gradients.width) * inverse * inverse;
        row_multiple(dx, x, gradients.width, static_cast<T>(-along), true);
      }

      if (was_scaled)
        for (int64_t d = 0; d < gradients.width; ++d) dx[d] = std::ldexp(dx[d], exponents_[i]);

      computed.write(gradients[i], gradients.width);
    }
  });
}

template class UnitRows<float>;
template class UnitRows<double>;
template class UnitRows<BFloat16>;

}  // namespace fastqt
