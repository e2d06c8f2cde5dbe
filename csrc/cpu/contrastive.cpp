// The contrastive loss on a CPU: a walk over the score matrix, tile by tile.
//
// Three matrix products make a gradient: the scores S = s F G^T, dF = s dS G and
// dG = s dS^T F. Where whole rows of S are at hand all three are made on them at once, 6 N M D
// operations in all. Otherwise one walk over tiles of a fixed size finds each row's log-sum-exp,
// and a second one computes the scores once more from there: 8 N M D. A sigmoid's cells know of
// no others, so that its gradient takes three products in tiles of any size.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/score_tile.h"
#include "cpu/walk.h"

namespace fastqt {
namespace {

// The losses of N rows, and their gradients, on one walk.
template <class T>
class RowLosses {
 public:
  RowLosses(Walk<T>& walk, const Cells<T>& cells, int64_t n) : walk_(walk), cells_(cells), n_(n) {}

  // Each row's log-sum-exp, mass and loss.
  void softmax(int64_t rows, int64_t columns, const RowSums& sums) {
    std::fill_n(sums.logsumexp, n_, -std::numeric_limits<double>::infinity());
    std::fill_n(sums.mass, n_, 0.0);
    std::fill_n(sums.loss, n_, 0.0);
    walk_.for_tiles(rows, columns, [&] { softmax_tile(cells_, walk_.tile(), sums, report); });
    finish(sums);
  }

  // The same, and the gradients of sum_i row_weights_i loss_i.
  void softmax_with_gradients(int64_t rows, const double* row_weights, const RowSums& sums) {
    walk_.for_chunks(rows, [&] {
      softmax_rows(cells_, walk_.tile(), row_weights, sums, report);
      walk_.differentiate();
    });
    finish(sums);
  }

  // The gradients of sum_i row_weights_i loss_i, from log-sum-exp and mass.
  void softmax_gradients(int64_t rows, int64_t columns, const double* row_weights, const RowSums& sums) {
    walk_.for_tiles(rows, columns, [&] {
      softmax_tile_backward(cells_, walk_.tile(), row_weights, sums.logsumexp, sums.mass, report);
      walk_.differentiate();
    });
  }

  // Each row's loss.
  void sigmoid(int64_t rows, int64_t columns, double* loss) {
    std::fill_n(loss, n_, 0.0);
    walk_.for_tiles(rows, columns, [&] { sigmoid_tile(cells_, walk_.tile(), loss, report); });
  }

  // The same, and the gradients of sum_i row_weights_i loss_i.
  void sigmoid_with_gradients(int64_t rows, int64_t columns, const double* row_weights, double* loss) {
    std::fill_n(loss, n_, 0.0);
    walk_.for_tiles(rows, columns, [&] {
      sigmoid_tile_backward(cells_, walk_.tile(), row_weights, loss, report);
      walk_.differentiate();
    });
  }

  Report report;

 private:
  void finish(const RowSums& sums) const {
    for (int64_t i = 0; i < n_; ++i)
      sums.loss[i] = sums.mass[i] > 0 ? sums.mass[i] * sums.logsumexp[i] + sums.loss[i] : 0;
  }

  Walk<T>& walk_;
  const Cells<T>& cells_;
  const int64_t n_;
};

template <class T>
const T* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

int64_t stride(const std::optional<Tensor>& tensor, int64_t dim) { return tensor ? tensor->stride(dim) : 0; }

// A scalar of `tensor`'s dtype.
void store(const Tensor& tensor, double value) {
  if (tensor.scalar_type() == torch::headeronly::ScalarType::Float) {
    *tensor.mutable_data_ptr<float>() = static_cast<float>(value);
  } else {
    *tensor.mutable_data_ptr<double>() = value;
  }
}

// An input's place among the bits of `wanted`, as in fastqt/schedule.py.
enum Input : int64_t { kQueries, kCandidates, kNegatives, kRowNegatives, kScale, kBias };

// Each row's loss. With `weight`, the gradients of total = weight * sum_i loss_i that are wanted,
// which for a softmax takes whole rows (no tile_columns); with row_weights those of
// sum_i row_weights_i loss_i, for a softmax from log-sum-exp and mass, which are found otherwise.
// Returns the total, or log-sum-exp, mass and loss of each row, or with row_weights nothing of the
// kind; then the gradients in the order of their bits; status, row and column of the first
// offending target.
std::tuple<std::vector<Tensor>, int64_t, int64_t, int64_t> contrastive_walk(
    const Tensor queries, const Tensor candidates, const std::optional<Tensor> negatives,
    const std::optional<Tensor> row_negatives, const std::optional<Tensor> bias, double scale, int64_t link,
    int64_t diagonal, const std::optional<Tensor> row_starts, const std::optional<Tensor> columns,
    const std::optional<Tensor> weights, const std::optional<Tensor> dense, const std::optional<Tensor> background,
    const std::optional<Tensor> query_groups, const std::optional<Tensor> candidate_groups,
    const std::optional<Tensor> mask, int64_t tile_rows, const std::optional<int64_t> tile_columns, int64_t wanted,
    const std::optional<double> weight, const std::optional<Tensor> row_weights,
    const std::optional<Tensor> logsumexp, const std::optional<Tensor> mass) {
  const int32_t in_double = aoti_torch_dtype_float64();
  const int64_t n = queries.size(0);
  std::vector<Tensor> found;
  found.reserve(9);
  std::vector<double> passing;  // what is known of each row only here
  passing.reserve(4 * n);       // so that none moves
  const auto pass = [&](double value) {
    passing.resize(passing.size() + n, value);
    return passing.data() + passing.size() - n;
  };
  const auto find = [&](const std::optional<Tensor>& known) {
    if (known) return known->mutable_data_ptr<double>();
    if (weight || row_weights) return pass(0);
    double* const first = found.emplace_back(new_tensor<1>({n}, in_double)).mutable_data_ptr<double>();
    std::fill_n(first, n, 0.0);
    return first;
  };
  double* const lse = find(logsumexp);
  const RowSums sums{lse, find(mass), find({})};
  const double* const w = weight ? pass(*weight) : pointer<double>(row_weights);
  if (weight) found.push_back(new_tensor<0>({}, dtype_of(queries)));

  const auto gradient_of = [&](Input input, const std::optional<Tensor>& x) -> std::optional<Tensor> {
    if (!(wanted >> input & 1)) return std::nullopt;
    if (input == kScale) return found.emplace_back(new_tensor<0>({}, in_double));
    if (input == kBias) return found.emplace_back(new_tensor<1>({x->size(0)}, dtype_of(*x)));
    return found.emplace_back(new_tensor<2>({x->size(0), x->size(1)}, dtype_of(*x)));
  };
  const auto dqueries = gradient_of(kQueries, queries), dcandidates = gradient_of(kCandidates, candidates),
             dnegatives = gradient_of(kNegatives, negatives),
             drow_negatives = gradient_of(kRowNegatives, row_negatives), dscale = gradient_of(kScale, {}),
             dbias = gradient_of(kBias, bias);
  const Embeddings embeddings{queries, candidates, negatives, row_negatives};
  const Gradients gradients{dqueries, dcandidates, dnegatives, drow_negatives, dbias, dscale};
  const auto run = [&]<class T>(T) {
    const Cells<T> cells{candidates.size(0),
                         diagonal,
                         pointer<T>(bias),
                         pointer<int64_t>(row_starts),
                         pointer<int64_t>(columns),
                         pointer<double>(weights),
                         pointer<T>(dense),
                         stride(dense, 0),
                         stride(dense, 1),
                         pointer<double>(background),
                         pointer<int64_t>(query_groups),
                         pointer<int64_t>(candidate_groups),
                         pointer<bool>(mask),
                         stride(mask, 0),
                         stride(mask, 1)};
    Walk<T> walk(embeddings, scale, gradients);
    RowLosses<T> losses(walk, cells, n);
    const int64_t width = tile_columns.value_or(std::numeric_limits<int64_t>::max());
    if (link == kSigmoid) {
      w ? losses.sigmoid_with_gradients(tile_rows, width, w, sums.loss) : losses.sigmoid(tile_rows, width, sums.loss);
    } else if (!w) {
      losses.softmax(tile_rows, width, sums);
    } else if (tile_columns) {
      losses.softmax_gradients(tile_rows, width, w, sums);
    } else {
      losses.softmax_with_gradients(tile_rows, w, sums);
    }
    if (weight) store(found.front(), *weight * std::accumulate(sums.loss, sums.loss + n, 0.0));
    return std::tuple{std::move(found), losses.report.status, losses.report.row, losses.report.column};
  };
  return queries.scalar_type() == torch::headeronly::ScalarType::Float ? run(float{}) : run(double{});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "contrastive_walk(Tensor queries, Tensor candidates, Tensor? negatives, Tensor? row_negatives, Tensor? bias, "
      "float scale, int link, int diagonal, Tensor? row_starts, Tensor? columns, Tensor? weights, Tensor? dense, "
      "Tensor? background, Tensor? query_groups, Tensor? candidate_groups, Tensor? mask, int tile_rows, "
      "int? tile_columns, int wanted, float? weight, Tensor? row_weights, Tensor? logsumexp, Tensor? mass) "
      "-> (Tensor[], int, int, int)");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) { m.impl("contrastive_walk", TORCH_BOX(&contrastive_walk)); }

}  // namespace fastqt
