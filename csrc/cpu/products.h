// Sums of matrix products. Products of bfloat16 matrices come out rounded to bfloat16. Where
// several are added up to a gradient, the sum is in float32, and is rounded at the end.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "cpu/dtypes.h"
#include "cpu/matrix.h"
#include "cpu/own_products.h"
#include "cpu/parallel.h"
#include "cpu/row_passes.h"

namespace fastqt {

// Adds factor * a b to `out`, or writes it there, for matrices a and b of S. In bfloat16 `out` can
// be written; only a sum in float32 can be added to. Torch has no such product: its goes through
// the first rows of `product`.
template <class S>
void add_product(const Tensor& out, const Tensor& a, const Tensor& b, bool add, double factor,
                 const Tensor& product) {
  if (!kRounds<S> || out.scalar_type() == ScalarType::BFloat16)
    return multiply(out, a, b, add, factor);
  if (own_multiply(out, a, b, add, factor, own_products_of(a))) return;
  const Tensor rounded = part(product, 0, {0, out.size(0)});
  multiply(rounded, a, b, 0, factor);
  const RowsOf<S> from(rounded);
  const RowsOf<Computed<S>> to(out);
  in_parallel(out.size(0), to.width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row_multiple(to[i], from[i], to.width, 1, add);
  });
}

// Writes the first rows of a sum, times the factor, to rows of a gradient of S.
template <class S>
void write_sum(const Tensor& gradient, Range rows, const Tensor& sum, double factor) {
  using T = Computed<S>;
  const RowsOf<S> to(gradient);
  const RowsOf<T> from(sum);
  in_parallel(rows.size(), to.width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if constexpr (kRounds<S>)
        row_round(to[rows.begin + i], from[i], to.width, static_cast<T>(factor));
      else row_multiple(to[rows.begin + i], from[i], to.width, static_cast<T>(factor), false);
    }
  });
}

}  // namespace fastqt
