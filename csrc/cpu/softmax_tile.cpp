// Softmax cross-entropy on a tile of the score matrix, in place.
//
// A tile holds scores s * <f_i, g_j> of some rows against some columns: first the M
// candidates, then negatives, which are nobody's target. `softmax_rows_` takes a tile of
// whole rows, finds their loss and turns their scores into its gradient. For other tiles,
// `softmax_tile_` adds each to its rows' log-sum-exp and loss, and `softmax_tile_backward_`
// makes the gradient once those are known.
//
// The few cells that are not plain, a row's targets and its replaced diagonal, are taken
// out of the vector passes and computed in double: w * (rho * p - t) has no correct digit
// left in fp32 once a positive is learnt and p is close to t.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <vector>

#include "cpu/softmax_rows.h"

namespace fastqt {
namespace {

using torch::stable::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The values of `diagonal` and `status[0]`, shared with fastqt/ops.py.
enum Diagonal : int64_t { kZero = 0, kExclude = 1, kKeep = 2 };
enum Status : int64_t {
  kOk = 0,
  kTargetOnDiagonal = 1,
  kTargetOutside = 2,
  kTargetNotPositive = 3,
  kTargetMasked = 4,
};

// The first offending target, by row, so that the report does not depend on threads.
class Report {
 public:
  explicit Report(const Tensor& status) : status_(status.mutable_data_ptr<int64_t>()) {}

  void operator()(Status code, int64_t row, int64_t column) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status_[0] == kOk || row < status_[1]) {
      status_[0] = code;
      status_[1] = row;
      status_[2] = column;
    }
  }

 private:
  std::mutex mutex_;
  int64_t* status_;
};

template <class T>
const T* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// What is to be computed of the whole score matrix, read-only.
template <class T>
struct Problem {
  int64_t candidates;
  int64_t diagonal;
  const int64_t* row_starts;  // targets as compressed rows ...
  const int64_t* columns;
  const double* weights;
  const T* dense;  // ... or as a matrix ...
  int64_t dense_row_stride = 0, dense_column_stride = 0;
  const double* background;  // ... plus one value for all of a row's candidates
  const int64_t* query_groups;
  const int64_t* candidate_groups;
  const bool* mask;
  int64_t mask_row_stride = 0, mask_column_stride = 0;

  Problem(int64_t candidates, int64_t diagonal, const std::optional<Tensor>& row_starts,
          const std::optional<Tensor>& columns, const std::optional<Tensor>& weights,
          const std::optional<Tensor>& dense, const std::optional<Tensor>& background,
          const std::optional<Tensor>& query_groups, const std::optional<Tensor>& candidate_groups,
          const std::optional<Tensor>& mask)
      : candidates(candidates),
        diagonal(diagonal),
        row_starts(pointer<int64_t>(row_starts)),
        columns(pointer<int64_t>(columns)),
        weights(pointer<double>(weights)),
        dense(pointer<T>(dense)),
        background(pointer<double>(background)),
        query_groups(pointer<int64_t>(query_groups)),
        candidate_groups(pointer<int64_t>(candidate_groups)),
        mask(pointer<bool>(mask)) {
    if (dense) dense_row_stride = dense->stride(0), dense_column_stride = dense->stride(1);
    if (mask) mask_row_stride = mask->stride(0), mask_column_stride = mask->stride(1);
  }

  bool masked(int64_t row, int64_t column) const {
    return mask != nullptr && mask[row * mask_row_stride + column * mask_column_stride];
  }

  bool same_group(int64_t row, int64_t column) const {
    return query_groups != nullptr && query_groups[row] == candidate_groups[column];
  }
};

// A cell that is computed alone: a target, or the diagonal replaced by a score of 0.
struct Cell {
  int64_t offset;  // within the tile's row
  double target;
  double score;
  bool replaced;  // no gradient reaches the embeddings
};

// log(exp(a) + exp(b)); a NaN in either is kept.
double log_add(double a, double b) {
  if (a == -kInfinity) return b;
  if (b == -kInfinity) return a;
  return std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
}

// One row of a tile: its scores, and its cells apart.
template <class T>
class Row {
 public:
  Row(const Problem<T>& problem, Report& report, T* scores, int64_t row, int64_t first_column, int64_t width,
      std::vector<Cell>& cells)
      : problem_(problem),
        report_(report),
        scores_(scores),
        row_(row),
        first_(first_column),
        width_(width),
        candidates_(std::clamp<int64_t>(problem.candidates - first_column, 0, width)),
        background_(problem.background == nullptr ? 0 : problem.background[row]),
        cells_(cells) {
    cells_.clear();
    collect_targets();
    if (background_ > 0) background_scores_ = row_sum(scores_, candidates_);
    for (Cell& cell : cells_) take_out(cell);
    apply_diagonal();
    apply_exclusions();
  }

  // The row's log-sum-exp. With `keep`, the plain cells become exp(score - reference).
  double logsumexp(bool keep) {
    double largest = row_max(scores_, width_);
    for (const Cell& cell : cells_) largest = cell.score > largest ? cell.score : largest;
    if (largest == -kInfinity) return -kInfinity;
    const T reference = static_cast<T>(largest);
    double total = keep ? row_exp(scores_, width_, reference) : row_exp_sum(scores_, width_, reference);
    for (const Cell& cell : cells_) total += std::exp(cell.score - reference);
    reference_ = reference;
    return reference_ + std::log(total);
  }

  // Adds to the row's target mass and to sum_j T_ij (log T_ij - s_ij).
  void add_targets(double& mass, double& linear) const {
    int64_t apart = 0;
    for (const Cell& cell : cells_) {
      apart += cell.offset < candidates_;
      if (cell.target == 0) continue;
      mass += cell.target;
      linear += cell.target * (std::log(cell.target) - cell.score);
    }
    if (background_ > 0) {
      const auto plain = static_cast<double>(candidates_ - apart);
      mass += plain * background_;
      linear += background_ * (plain * std::log(background_) - background_scores_);
    }
  }

  // Turns kept exponentials into w * (rho * p - t).
  void differentiate_kept(double logsumexp, double mass, double weight) {
    if (mass == 0) return clear();
    write_plain(weight * mass * std::exp(reference_ - logsumexp), weight);
    write_cells(logsumexp, mass, weight);
  }

  // The same from scores.
  void differentiate(double logsumexp, double mass, double weight) {
    if (mass == 0) return clear();
    const T reference = static_cast<T>(logsumexp);
    row_exp(scores_, width_, reference);
    write_plain(weight * mass * std::exp(static_cast<double>(reference) - logsumexp), weight);
    write_cells(logsumexp, mass, weight);
  }

 private:
  void add_target(int64_t column, double target) {
    if (target == 0) return;
    if (!(target > 0)) return report_(kTargetNotPositive, row_, column);
    if (column < 0 || column >= problem_.candidates) return report_(kTargetOutside, row_, column);
    if (column < first_ || column >= first_ + width_) return;
    if (column == row_ && problem_.diagonal != kKeep) return report_(kTargetOnDiagonal, row_, column);
    if (problem_.masked(row_, column)) return report_(kTargetMasked, row_, column);
    cells_.push_back({column - first_, target + background_, 0.0, false});
  }

  void collect_targets() {
    if (problem_.row_starts != nullptr) {
      for (int64_t k = problem_.row_starts[row_]; k < problem_.row_starts[row_ + 1]; ++k)
        add_target(problem_.columns[k], problem_.weights[k]);
    } else {
      const T* targets = problem_.dense + row_ * problem_.dense_row_stride;
      for (int64_t j = first_; j < first_ + candidates_; ++j)
        add_target(j, targets[j * problem_.dense_column_stride]);
    }
  }

  void take_out(Cell& cell) {
    cell.score = scores_[cell.offset];
    background_scores_ -= cell.score;
    scores_[cell.offset] = -std::numeric_limits<T>::infinity();
  }

  void apply_diagonal() {
    const int64_t offset = row_ - first_;
    if (problem_.diagonal == kKeep || offset < 0 || offset >= candidates_) return;
    Cell cell{offset, background_, 0.0, true};
    take_out(cell);
    if (problem_.diagonal == kExclude || problem_.masked(row_, row_) || problem_.same_group(row_, row_)) return;
    cell.score = 0;
    cells_.push_back(cell);
  }

  void apply_exclusions() {
    if (problem_.query_groups != nullptr)
      row_exclude_group(scores_, problem_.candidate_groups + first_, candidates_, problem_.query_groups[row_]);
    if (problem_.mask != nullptr)
      for (int64_t j = 0; j < candidates_; ++j)
        if (problem_.masked(row_, first_ + j)) scores_[j] = -std::numeric_limits<T>::infinity();
  }

  void clear() { std::fill(scores_, scores_ + width_, T(0)); }

  void write_plain(double factor, double weight) {
    const auto f = static_cast<T>(factor);
    row_affine(scores_, candidates_, f, static_cast<T>(weight * background_));
    row_affine(scores_ + candidates_, width_ - candidates_, f, T(0));
  }

  void write_cells(double logsumexp, double mass, double weight) {
    for (const Cell& cell : cells_)
      scores_[cell.offset] =
          cell.replaced ? T(0) : static_cast<T>(weight * (mass * std::exp(cell.score - logsumexp) - cell.target));
  }

  const Problem<T>& problem_;
  Report& report_;
  T* scores_;
  const int64_t row_, first_, width_, candidates_;
  const double background_;
  double background_scores_ = 0;
  double reference_ = 0;
  std::vector<Cell>& cells_;
};

// Calls f(row, its index) for all of a tile's rows, in parallel. `cells` are Problem's arguments.
template <class T, class F, class... Cells>
void visit_rows_of(const Tensor& tile, int64_t first_row, int64_t first_column, const Tensor& status, const F& f,
                   const Cells&... cells) {
  constexpr int64_t kCellsPerTask = 16384;
  const Problem<T> problem(cells...);
  Report report(status);
  const int64_t width = tile.size(1), stride = tile.stride(0);
  T* scores = tile.mutable_data_ptr<T>();
  const int64_t grain = std::max<int64_t>(1, kCellsPerTask / std::max<int64_t>(1, width));
  torch::stable::parallel_for(0, tile.size(0), grain, [&](int64_t begin, int64_t end) {
    std::vector<Cell> scratch;
    for (int64_t i = begin; i < end; ++i) {
      Row<T> row(problem, report, scores + i * stride, first_row + i, first_column, width, scratch);
      f(row, first_row + i);
    }
  });
}

template <class F, class... Cells>
void visit_rows(const Tensor& tile, int64_t first_row, int64_t first_column, const Tensor& status, const F& f,
                const Cells&... cells) {
  if (tile.scalar_type() == torch::headeronly::ScalarType::Float) {
    visit_rows_of<float>(tile, first_row, first_column, status, f, cells...);
  } else {
    visit_rows_of<double>(tile, first_row, first_column, status, f, cells...);
  }
}

void softmax_rows_(const Tensor tile, int64_t first_row, int64_t candidates, int64_t diagonal,
                   const std::optional<Tensor> row_starts, const std::optional<Tensor> columns,
                   const std::optional<Tensor> weights, const std::optional<Tensor> dense,
                   const std::optional<Tensor> background, const std::optional<Tensor> query_groups,
                   const std::optional<Tensor> candidate_groups, const std::optional<Tensor> mask, double weight,
                   const Tensor logsumexp, const Tensor mass, const Tensor loss, const Tensor status) {
  auto* const lse = logsumexp.mutable_data_ptr<double>();
  auto* const rho = mass.mutable_data_ptr<double>();
  auto* const losses = loss.mutable_data_ptr<double>();
  const auto visit = [&](auto& row, int64_t r) {
    double linear = 0;
    rho[r] = 0;
    row.add_targets(rho[r], linear);
    lse[r] = row.logsumexp(true);
    losses[r] = rho[r] > 0 ? rho[r] * lse[r] + linear : 0;
    row.differentiate_kept(lse[r], rho[r], weight);
  };
  visit_rows(tile, first_row, 0, status, visit, candidates, diagonal, row_starts, columns, weights, dense, background,
             query_groups, candidate_groups, mask);
}

void softmax_tile_(const Tensor tile, int64_t first_row, int64_t first_column, int64_t candidates, int64_t diagonal,
                   const std::optional<Tensor> row_starts, const std::optional<Tensor> columns,
                   const std::optional<Tensor> weights, const std::optional<Tensor> dense,
                   const std::optional<Tensor> background, const std::optional<Tensor> query_groups,
                   const std::optional<Tensor> candidate_groups, const std::optional<Tensor> mask,
                   const Tensor logsumexp, const Tensor mass, const Tensor linear, const Tensor status) {
  auto* const lse = logsumexp.mutable_data_ptr<double>();
  auto* const rho = mass.mutable_data_ptr<double>();
  auto* const lin = linear.mutable_data_ptr<double>();
  const auto visit = [&](auto& row, int64_t r) {
    row.add_targets(rho[r], lin[r]);
    lse[r] = log_add(lse[r], row.logsumexp(false));
  };
  visit_rows(tile, first_row, first_column, status, visit, candidates, diagonal, row_starts, columns, weights, dense,
             background, query_groups, candidate_groups, mask);
}

void softmax_tile_backward_(const Tensor tile, int64_t first_row, int64_t first_column, int64_t candidates,
                            int64_t diagonal, const std::optional<Tensor> row_starts,
                            const std::optional<Tensor> columns, const std::optional<Tensor> weights,
                            const std::optional<Tensor> dense, const std::optional<Tensor> background,
                            const std::optional<Tensor> query_groups, const std::optional<Tensor> candidate_groups,
                            const std::optional<Tensor> mask, const Tensor row_weights, const Tensor logsumexp,
                            const Tensor mass, const Tensor status) {
  const auto* const lse = logsumexp.const_data_ptr<double>();
  const auto* const rho = mass.const_data_ptr<double>();
  const auto* const w = row_weights.const_data_ptr<double>();
  const auto visit = [&](auto& row, int64_t r) { row.differentiate(lse[r], rho[r], w[r]); };
  visit_rows(tile, first_row, first_column, status, visit, candidates, diagonal, row_starts, columns, weights, dense,
             background, query_groups, candidate_groups, mask);
}

}  // namespace

#define FASTQT_CELLS                                                                              \
  "int candidates, int diagonal, Tensor? row_starts, Tensor? columns, Tensor? weights, Tensor? dense, " \
  "Tensor? background, Tensor? query_groups, Tensor? candidate_groups, Tensor? mask, "

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "softmax_rows_(Tensor(a!) tile, int first_row, " FASTQT_CELLS
      "float weight, Tensor(b!) logsumexp, Tensor(c!) mass, Tensor(d!) loss, Tensor(e!) status) -> ()");
  m.def(
      "softmax_tile_(Tensor(a!) tile, int first_row, int first_column, " FASTQT_CELLS
      "Tensor(b!) logsumexp, Tensor(c!) mass, Tensor(d!) linear, Tensor(e!) status) -> ()");
  m.def(
      "softmax_tile_backward_(Tensor(a!) tile, int first_row, int first_column, " FASTQT_CELLS
      "Tensor row_weights, Tensor logsumexp, Tensor mass, Tensor(b!) status) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("softmax_rows_", TORCH_BOX(&softmax_rows_));
  m.impl("softmax_tile_", TORCH_BOX(&softmax_tile_));
  m.impl("softmax_tile_backward_", TORCH_BOX(&softmax_tile_backward_));
}

}  // namespace fastqt
