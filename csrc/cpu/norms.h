// Matrices whose rows count at norm 1, without a copy of them: products take the rows as they are,
// and what comes out of the products is multiplied by the rows' inverse norms.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "cpu/dtypes.h"
#include "cpu/matrix.h"

namespace fastqt {

// As in torch.nn.functional.normalize: the norm of a shorter row counts as this.
constexpr double kLeastNorm = 1e-12;

template <class S>
class UnitRows {
 public:
  using T = Computed<S>;

  explicit UnitRows(const Tensor& matrix);

  // What products take: the matrix itself. A matrix with norms so large that products would
  // overflow has been copied, with each of its rows multiplied by a power of two.
  const Tensor& rows() const { return rows_; }

  // 1 / max(norm, 1e-12) of each of `rows()`.
  const std::vector<T>& inverse_norms() const { return inverse_norms_; }
  const std::vector<double>& unrounded_inverse_norms() const { return unrounded_inverse_norms_; }

  // Finishes a gradient (rows, D). It holds the gradient of row x / |x| divided by |x|, and becomes
  // that of the row of the matrix itself.
  void finish_gradient(const Tensor& gradient) const;

 private:
  void scale_rows(const std::vector<double>& norms);

  Tensor rows_;
  std::vector<T> inverse_norms_;
  std::vector<double> unrounded_inverse_norms_;
  std::vector<int> exponents_;  // of the powers of two; empty if `rows_` is the matrix itself
};

}  // namespace fastqt
