// The similarities of some queries with some candidates, each pair on its own, summed in float64.
//
// One operator is for what a loss asks of its targets before it makes the scores of all. In torch's
// operations the rows of the pairs are copied, and each step of the formula is a walk over them; a
// small batch then takes as long for its targets as for a tenth of its scores. The other one tells
// which similarities of all pairs are above a threshold, from products in float32 that decide
// nearly all of them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "cpu/checks.h"
#include "cpu/dtypes.h"
#include "cpu/matrix.h"
#include "cpu/parallel.h"
#include "cpu/row_passes.h"

namespace fastqt {
namespace {

using fastqt::row_products;

// It is not inline beside row_dot: clang makes no versions of a function that is called before it
// is defined.
Products row_products(const BFloat16* x, const BFloat16* y, int64_t n) {
  return {row_dot(x, y, n), row_dot(x, x, n), row_dot(y, y, n)};
}

// <f, g>, or the cosine of f and g, in which a norm below `least_norm` counts as that.
template <class S>
double similarity(const S* f, const S* g, int64_t D, bool normalize, double least_norm) {
  if (!normalize) return row_dot(f, g, D);
  const Products products = row_products(f, g, D);
  const auto norm = [&](double square) {
    const double length = std::sqrt(square);
    return length < least_norm ? least_norm
                               : length;  // a NaN stays: the comparison is false for it
  };
  return products.xy / (norm(products.xx) * norm(products.yy));
}

// The similarity of query rows[e] with candidate columns[e] for each e, in the dtype of losses.
Tensor row_similarities(const Tensor& queries, const Tensor& candidates, const Tensor& rows,
                        const Tensor& columns, bool normalize, double least_norm) {
  check_queries(queries, true);
  const int64_t D = queries.size(1), entries = rows.numel();
  check_tensor("candidates", candidates, queries.scalar_type(), {kAnySize, D}, Layout::kStrided);
  STD_TORCH_CHECK((queries.stride(1) == 1 && candidates.stride(1) == 1) || D == 1,
                  "queries, candidates: want rows with adjacent columns");
  for (const auto* indices : {&rows, &columns})
    STD_TORCH_CHECK(indices->is_cpu() && indices->scalar_type() == ScalarType::Long &&
                        indices->dim() == 1 && indices->numel() == entries &&
                        indices->is_contiguous(),
                    "rows, columns: want two contiguous int64 vectors of one length, got ",
                    described(rows), " and ", described(columns));

  return with_dtype(queries.scalar_type(), [&]<class S>(S) -> Tensor {
    using T = Computed<S>;
    const Tensor made =
        new_tensor<1>({entries}, sizeof(T) == sizeof(double) ? aoti_torch_dtype_float64()
                                                             : aoti_torch_dtype_float32());
    T* const out = made.mutable_data_ptr<T>();
    const RowsOf<S> f(queries), g(candidates);
    const int64_t N = queries.size(0), M = candidates.size(0);
    const auto *row = rows.const_data_ptr<int64_t>(), *column = columns.const_data_ptr<int64_t>();
    std::atomic<bool> outside = false;
    in_parallel(entries, 3 * D, [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; ++e) {
        if (row[e] < 0 || row[e] >= N || column[e] < 0 || column[e] >= M) outside = true;
        else out[e] = static_cast<T>(similarity(f[row[e]], g[column[e]], D, normalize, least_norm));
      }
    });
    STD_TORCH_CHECK(!outside, "rows, columns: want indices of rows of ", N, " queries and ", M,
                    " candidates");
    return made;
  });
}

// Writes to `mask` (n, m) which similarities of float32 queries and candidates are above the
// thresholds of their rows, compared in float32. `products` (n, m) are inner products in float32:
// times the factors of row i and of column j, they differ from the similarities by less than
// errors[i] where they are finite. What that does not decide is summed in float64.
void above_thresholds(Tensor mask, const Tensor& products, const Tensor& queries,
                      const Tensor& candidates, const Tensor& row_factors,
                      const Tensor& column_factors, const Tensor& thresholds, const Tensor& errors,
                      bool normalize, double least_norm) {
  check_tensor("queries", queries, ScalarType::Float, {kAnySize, kAnySize}, Layout::kStrided);
  const int64_t n = queries.size(0), D = queries.size(1), m = candidates.size(0);
  check_tensor("candidates", candidates, ScalarType::Float, {kAnySize, D}, Layout::kStrided);
  check_tensor("products", products, ScalarType::Float, {n, m}, Layout::kStrided);
  check_tensor("mask", mask, ScalarType::Bool, {n, m}, Layout::kStrided);
  check_tensor("row_factors", row_factors, ScalarType::Float, {n}, Layout::kContiguous);
  check_tensor("column_factors", column_factors, ScalarType::Float, {m}, Layout::kContiguous);
  check_tensor("thresholds", thresholds, ScalarType::Float, {n}, Layout::kContiguous);
  check_tensor("errors", errors, ScalarType::Float, {n}, Layout::kContiguous);
  for (const auto* matrix : {&queries, &candidates})
    STD_TORCH_CHECK(matrix->stride(1) == 1 || D == 1,
                    "queries, candidates: want rows with adjacent columns");
  for (const auto* matrix : {static_cast<const Tensor*>(&mask), &products})
    STD_TORCH_CHECK(matrix->stride(1) == 1 || m == 1,
                    "mask, products: want rows with adjacent columns");

  const RowsOf<float> f(queries), g(candidates), x(products);
  const RowsOf<uint8_t> above(mask);  // a byte for each truth value
  const auto *factors = row_factors.const_data_ptr<float>(),
             *columns = column_factors.const_data_ptr<float>(),
             *limits = thresholds.const_data_ptr<float>(),
             *margins = errors.const_data_ptr<float>();
  in_parallel(n, m, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint8_t* const row = above[i];
      if (!row_above(x[i], columns, m, factors[i], limits[i], margins[i], row)) continue;
      for (int64_t j = 0; j < m; ++j)
        if (row[j] == kUndecided)
          row[j] = static_cast<float>(similarity(f[i], g[j], D, normalize, least_norm)) > limits[i];
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "row_similarities(Tensor queries, Tensor candidates, Tensor rows, Tensor columns, bool "
      "normalize, "
      "float least_norm) -> Tensor");
  m.def(
      "above_thresholds_(Tensor(a!) mask, Tensor products, Tensor queries, Tensor candidates, "
      "Tensor row_factors, "
      "Tensor column_factors, Tensor thresholds, Tensor errors, bool normalize, float least_norm) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("row_similarities", TORCH_BOX(&row_similarities));
  m.impl("above_thresholds_", TORCH_BOX(&above_thresholds));
}

}  // namespace fastqt
