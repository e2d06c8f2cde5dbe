// The contrastive loss on a CPU, tile by tile of the score matrix: three operators.
//
// A gradient needs three matrix products: the scores S = s F G^T, dF = s dS G and dG = s dS^T F.
// `contrastive_loss_with_gradients` makes all three while a tile of scores is at hand, 6 N M D
// operations in all. A softmax needs its whole row for that, so that its tiles are whole rows; the
// cells of a sigmoid do not depend on each other, and it takes tiles of any size.
// `contrastive_loss_rows` finds the loss of each row from tiles of a fixed size, and
// `contrastive_loss_backward` computes the scores once more to find the gradients from the saved
// logsumexp and mass: 8 N M D operations together, or 6 for the rows whose
// scores the first has kept.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/checks.h"
#include "cpu/dtypes.h"
#include "cpu/problem.h"
#include "cpu/problem_operators.h"
#include "cpu/score_tile.h"
#include "cpu/walk.h"

namespace fastqt {
namespace {

// The losses of N rows, and the gradients of sum_i row_weights_i loss_i, found on one walk over the
// scores.
template <class S>
class RowLosses {
 public:
  RowLosses(Walk<S>& walk, const Cells<Computed<S>>& cells, const Problem& p)
      : walk_(walk), cells_(cells), N_(p.rows()),
        mass_without_targets_(p.link == kLogSumExp ? 1 : 0) {}

  void softmax(int64_t tile_rows, int64_t tile_columns, const RowSums& sums) {
    std::fill_n(sums.logsumexp, N_, -std::numeric_limits<double>::infinity());
    begin(sums);
    walk_.for_tiles(tile_rows, tile_columns,
                    [&] { softmax_tile(cells_, walk_.tile(), sums, report); });
    add_logsumexp_to_loss(sums);
  }

  void softmax_with_gradients(int64_t tile_rows, const double* row_weights, const RowSums& sums) {
    begin(sums);
    walk_.for_chunks(tile_rows, [&] {
      softmax_rows(cells_, walk_.tile(), row_weights, sums, report);
      walk_.differentiate();
    });
    add_logsumexp_to_loss(sums);
  }

  void softmax_backward(int64_t tile_rows, int64_t tile_columns, const double* row_weights,
                        const double* logsumexp, const double* mass) {
    walk_.for_tiles(tile_rows, tile_columns, [&] {
      softmax_tile_backward(cells_, walk_.tile(), row_weights, logsumexp, mass, report);
      walk_.differentiate();
    });
  }

  void sigmoid(int64_t tile_rows, int64_t tile_columns, double* loss) {
    std::fill_n(loss, N_, 0.0);
    walk_.for_tiles(tile_rows, tile_columns,
                    [&] { sigmoid_tile(cells_, walk_.tile(), loss, report); });
  }

  void sigmoid_with_gradients(int64_t tile_rows, int64_t tile_columns, const double* row_weights,
                              double* loss) {
    std::fill_n(loss, N_, 0.0);
    walk_.for_tiles(tile_rows, tile_columns, [&] {
      sigmoid_tile_backward(cells_, walk_.tile(), row_weights, loss, report);
      walk_.differentiate();
    });
  }

  Report report;

 private:
  void begin(const RowSums& sums) const {
    std::fill_n(sums.mass, N_, mass_without_targets_);
    std::fill_n(sums.loss, N_, 0.0);
  }

  void add_logsumexp_to_loss(const RowSums& sums) const {
    for (int64_t i = 0; i < N_; ++i)
      sums.loss[i] = sums.mass[i] > 0 ? sums.mass[i] * sums.logsumexp[i] + sums.loss[i] : 0;
  }

  Walk<S>& walk_;
  const Cells<Computed<S>>& cells_;
  const int64_t N_;
  const double mass_without_targets_;
};

// The first target that a loss cannot have, as three numbers that an operator returns: status, row,
// column.
using TargetFault = std::tuple<int64_t, int64_t, int64_t>;

// Calls compute(RowLosses<S>&, Walk<S>&) with the dtype of the problem for S.
template <class F>
TargetFault with_row_losses(const Problem& p, const Gradients& gradients, const F& compute) {
  return with_dtype(p.queries.scalar_type(), [&]<class S>(S) -> TargetFault {
    const Cells<Computed<S>> cells = cells_of<Computed<S>>(p, gradients);
    Walk<S> walk(p.embeddings(), p.scale, gradients, p.normalize);
    RowLosses<S> losses(walk, cells, p);
    compute(losses, walk);
    walk.finish();
    return {losses.report.status, losses.report.row, losses.report.column};
  });
}

void check_scores(const Problem& p, const std::optional<Tensor>& scores) {
  const int64_t width =
      p.candidates.size(0) + (p.negatives ? p.negatives->size(0) : 0) + (p.row_negatives ? 1 : 0);
  check_kept_scores(scores, p.queries.scalar_type(), p.rows(), width);
}

Tensor row_zeros(int64_t rows) {
  const Tensor made = new_tensor<1>({rows}, aoti_torch_dtype_float64());
  std::fill_n(made.mutable_data_ptr<double>(), rows, 0.0);
  return made;
}

// A scalar of the dtype of losses.
Tensor scalar_loss(ScalarType embeddings, double value) {
  if (computed_dtype(embeddings) == ScalarType::Double) {
    const Tensor made = new_tensor<0>({}, aoti_torch_dtype_float64());
    *made.mutable_data_ptr<double>() = value;
    return made;
  }
  const Tensor made = new_tensor<0>({}, aoti_torch_dtype_float32());
  *made.mutable_data_ptr<float>() = static_cast<float>(value);
  return made;
}

// Logsumexp and mass (zeros for a sigmoid) and the loss of each row, (N,) float64. With `scores`,
// writes those of the first rows there, which `loss_backward` would compute once more.
std::tuple<Tensor, Tensor, Tensor, int64_t, int64_t, int64_t> loss_rows(
    const Problem& p, int64_t tile_rows, int64_t tile_columns, const std::optional<Tensor> scores) {
  check(p);
  check_tile(tile_rows, tile_columns);
  check_scores(p, scores);
  const Tensor logsumexp = row_zeros(p.rows()), mass = row_zeros(p.rows()),
               loss = row_zeros(p.rows());
  const RowSums sums{logsumexp.mutable_data_ptr<double>(), mass.mutable_data_ptr<double>(),
                     loss.mutable_data_ptr<double>()};
  const auto [status, row, column] = with_row_losses(p, {}, [&](auto& losses, auto& walk) {
    if (scores) walk.keep(*scores);
    p.link == kSigmoid ? losses.sigmoid(tile_rows, tile_columns, sums.loss)
                       : losses.softmax(tile_rows, tile_columns, sums);
  });
  return {logsumexp, mass, loss, status, row, column};
}

// total = row_weight * sum_i loss_i, and its gradients that are needed.
std::tuple<Tensor, std::vector<Tensor>, int64_t, int64_t, int64_t> loss_with_gradients(
    const Problem& p, int64_t tile_rows, std::optional<int64_t> tile_columns, double row_weight,
    const std::vector<bool> needs) {
  check(p);
  check_tile(tile_rows, tile_columns.value_or(1));
  STD_TORCH_CHECK(p.link == kSigmoid || !tile_columns,
                  "tile_columns: want None for a softmax, whose gradients in the forward pass take "
                  "whole rows, got ",
                  *tile_columns);

  const Gradients gradients = new_gradients(p, needs);
  const int64_t N = p.rows();
  std::vector<double> statistics(3 * N);
  const std::vector<double> row_weights(N, row_weight);
  const RowSums sums{statistics.data(), statistics.data() + N, statistics.data() + 2 * N};

  const auto [status, row, column] = with_row_losses(p, gradients, [&](auto& losses, auto&) {
    if (p.link == kSigmoid) {
      const int64_t columns = tile_columns.value_or(std::numeric_limits<int64_t>::max());
      losses.sigmoid_with_gradients(tile_rows, columns, row_weights.data(), sums.loss);
    } else {
      losses.softmax_with_gradients(tile_rows, row_weights.data(), sums);
    }
  });

  const double loss = row_weight * std::accumulate(sums.loss, sums.loss + N, 0.0);
  const Tensor total = scalar_loss(p.queries.scalar_type(), loss);
  return {total, present(gradients), status, row, column};
}

// The gradients of sum_i row_weights_i loss_i that are needed, from what `loss_rows` found, and
// from the scores if it has kept them.
std::tuple<std::vector<Tensor>, int64_t, int64_t, int64_t> loss_backward(
    const Problem& p, int64_t tile_rows, int64_t tile_columns, const Tensor row_weights,
    const Tensor logsumexp, const Tensor mass, const std::optional<Tensor> scores,
    const std::vector<bool> needs) {
  check(p);
  check_tile(tile_rows, tile_columns);
  check_scores(p, scores);
  const int64_t N = p.rows();
  check_tensor("row_weights", row_weights, ScalarType::Double, {N}, Layout::kContiguous);
  check_tensor("logsumexp", logsumexp, ScalarType::Double, {N}, Layout::kContiguous);
  check_tensor("mass", mass, ScalarType::Double, {N}, Layout::kContiguous);
  const Gradients gradients = new_gradients(p, needs);
  const double* const weights = row_weights.const_data_ptr<double>();
  const auto [status, row, column] = with_row_losses(p, gradients, [&](auto& losses, auto& walk) {
    if (scores) walk.reuse(*scores);
    if (p.link == kSigmoid) {
      std::vector<double> loss(N);
      losses.sigmoid_with_gradients(tile_rows, tile_columns, weights, loss.data());
    } else {
      losses.softmax_backward(tile_rows, tile_columns, weights, logsumexp.const_data_ptr<double>(),
                              mass.const_data_ptr<double>());
    }
  });
  return {present(gradients), status, row, column};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(("contrastive_loss_rows(" + kProblem +
         "int tile_rows, int tile_columns, Tensor(a!)? scores) "
         "-> (Tensor logsumexp, Tensor mass, Tensor loss, int status, int row, int column)")
            .c_str());
  m.def(("contrastive_loss_with_gradients(" + kProblem +
         "int tile_rows, int? tile_columns, float row_weight, bool[] needs) "
         "-> (Tensor total, Tensor[] gradients, int status, int row, int column)")
            .c_str());
  m.def(("contrastive_loss_backward(" + kProblem +
         "int tile_rows, int tile_columns, Tensor row_weights, Tensor logsumexp, Tensor mass, "
         "Tensor? scores, bool[] needs) "
         "-> (Tensor[] gradients, int status, int row, int column)")
            .c_str());
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("contrastive_loss_rows", TORCH_BOX(&WithProblem<&loss_rows>::call));
  m.impl("contrastive_loss_with_gradients", TORCH_BOX(&WithProblem<&loss_with_gradients>::call));
  m.impl("contrastive_loss_backward", TORCH_BOX(&WithProblem<&loss_backward>::call));
}

}  // namespace fastqt
