#include "cpu/score_tile.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/log_sums.h"
#include "cpu/parallel.h"
#include "cpu/row_passes.h"

// The few cells that are not plain, a row's targets and its replaced diagonal, are taken
// out of the vector passes and computed in double: w * (rho * p - t) has no correct digit
// left in fp32 once a positive is learnt and p is close to t.

namespace fastqt {
namespace {

// A cell that is computed alone: a target, or the diagonal replaced by a score of 0.
struct Cell {
  int64_t offset;  // within the tile's row
  double target;
  double score;
  bool replaced;  // no gradient reaches the embeddings
};

// 1 / (1 + exp(-x)) - t, with all its digits also where the sigmoid is close to t = 1.
double sigmoid_minus(double x, double t) {
  const double e = std::exp(-std::abs(x));
  return (x > 0 ? (1 - t) - t * e : (1 - t) * e - t) / (1 + e);
}

// One row of a tile: its scores, and its cells apart.
template <class T>
class Row {
 public:
  Row(const Cells<T>& cells, Report& report, T* scores, int64_t row, int64_t first_column, int64_t width,
      std::vector<Cell>& apart)
      : cells_(cells),
        report_(report),
        scores_(scores),
        row_(row),
        first_(first_column),
        width_(width),
        candidates_(std::clamp<int64_t>(cells.candidates - first_column, 0, width)),
        background_(cells.background == nullptr ? 0 : cells.background[row]),
        apart_(apart) {
    apart_.clear();
    if (cells.bias != nullptr) row_add(scores_, cells.bias + first_, candidates_);
    collect_targets();
    if (background_ > 0) background_scores_ = row_sum(scores_, candidates_);
    for (Cell& cell : apart_) take_out(cell);
    apply_diagonal();
    apply_exclusions();
  }

  // The row's log-sum-exp. With `keep`, the plain cells become exp(score - reference).
  double logsumexp(bool keep) {
    double largest = row_max(scores_, width_);
    for (const Cell& cell : apart_) largest = cell.score > largest ? cell.score : largest;
    if (largest == -kInfinity) return -kInfinity;
    const T reference = static_cast<T>(largest);
    double total = keep ? row_exp(scores_, width_, reference) : row_exp_sum(scores_, width_, reference);
    for (const Cell& cell : apart_) total += std::exp(cell.score - reference);
    reference_ = reference;
    return reference_ + std::log(total);
  }

  // Adds to the row's target mass and to sum_j T_ij (log T_ij - s_ij).
  void add_targets(double& mass, double& linear) const {
    int64_t candidates_apart = 0;
    for (const Cell& cell : apart_) {
      candidates_apart += cell.offset < candidates_;
      if (cell.target == 0) continue;
      mass += cell.target;
      linear += cell.target * (std::log(cell.target) - cell.score);
    }
    if (background_ > 0) {
      const auto plain = static_cast<double>(candidates_ - candidates_apart);
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

  // sum_j log(1 + exp(s_ij)) - T_ij s_ij
  double sigmoid_loss() const { return row_softplus_sum(scores_, width_) + sigmoid_loss_of_cells(); }

  // The same, and turns the scores into w * (sigmoid - t).
  double differentiate_sigmoid(double weight) {
    const auto w = static_cast<T>(weight);
    const double plain = row_sigmoid(scores_, candidates_, w, static_cast<T>(weight * background_)) +
                         row_sigmoid(scores_ + candidates_, width_ - candidates_, w, T(0));
    for (const Cell& cell : apart_)
      scores_[cell.offset] = cell.replaced ? T(0) : static_cast<T>(weight * sigmoid_minus(cell.score, cell.target));
    return plain + sigmoid_loss_of_cells();
  }

 private:
  void add_target(int64_t column, double target) {
    if (target == 0) return;
    if (!(target > 0)) return report_(kTargetNotPositive, row_, column);
    if (column < 0 || column >= cells_.candidates) return report_(kTargetOutside, row_, column);
    if (column < first_ || column >= first_ + width_) return;
    if (column == row_ && cells_.diagonal != kKeep) return report_(kTargetOnDiagonal, row_, column);
    if (cells_.masked(row_, column)) return report_(kTargetMasked, row_, column);
    apart_.push_back({column - first_, target + background_, 0.0, false});
  }

  void collect_targets() {
    if (cells_.row_starts != nullptr) {
      for (int64_t k = cells_.row_starts[row_]; k < cells_.row_starts[row_ + 1]; ++k)
        add_target(cells_.columns[k], cells_.weights[k]);
    } else {
      const T* targets = cells_.dense + row_ * cells_.dense_row_stride;
      for (int64_t j = first_; j < first_ + candidates_; ++j)
        add_target(j, targets[j * cells_.dense_column_stride]);
    }
  }

  void take_out(Cell& cell) {
    cell.score = scores_[cell.offset];
    background_scores_ -= cell.score;
    scores_[cell.offset] = -std::numeric_limits<T>::infinity();
  }

  void apply_diagonal() {
    const int64_t offset = row_ - first_;
    if (cells_.diagonal == kKeep || offset < 0 || offset >= candidates_) return;
    Cell cell{offset, background_, 0.0, true};
    take_out(cell);
    if (cells_.diagonal == kExclude || cells_.masked(row_, row_) || cells_.same_group(row_, row_)) return;
    cell.score = 0;
    apart_.push_back(cell);
  }

  void apply_exclusions() {
    if (cells_.query_groups != nullptr)
      row_exclude_group(scores_, cells_.candidate_groups + first_, candidates_, cells_.query_groups[row_]);
    if (cells_.mask != nullptr)
      for (int64_t j = 0; j < candidates_; ++j)
        if (cells_.masked(row_, first_ + j)) scores_[j] = -std::numeric_limits<T>::infinity();
  }

  // Of the cells apart, and of the plain ones what is linear in their scores.
  double sigmoid_loss_of_cells() const {
    double total = background_ > 0 ? -background_ * background_scores_ : 0;
    for (const Cell& cell : apart_) total += softplus(cell.score) - cell.target * cell.score;
    return total;
  }

  void clear() { std::fill(scores_, scores_ + width_, T(0)); }

  void write_plain(double factor, double weight) {
    const auto f = static_cast<T>(factor);
    row_affine(scores_, candidates_, f, static_cast<T>(weight * background_));
    row_affine(scores_ + candidates_, width_ - candidates_, f, T(0));
  }

  void write_cells(double logsumexp, double mass, double weight) {
    for (const Cell& cell : apart_)
      scores_[cell.offset] =
          cell.replaced ? T(0) : static_cast<T>(weight * (mass * std::exp(cell.score - logsumexp) - cell.target));
  }

  const Cells<T>& cells_;
  Report& report_;
  T* scores_;
  const int64_t row_, first_, width_, candidates_;
  const double background_;
  double background_scores_ = 0;
  double reference_ = 0;
  std::vector<Cell>& apart_;
};

// Calls visit(row, its index) for all of a tile's rows, in parallel.
template <class T, class F>
void visit_rows(const Cells<T>& cells, const Tile<T>& tile, Report& report, const F& visit) {
  in_parallel(tile.rows, tile.columns, [&](int64_t begin, int64_t end) {
    std::vector<Cell> apart;
    for (int64_t i = begin; i < end; ++i) {
      Row<T> row(cells, report, tile.scores + i * tile.row_stride, tile.first_row + i, tile.first_column,
                 tile.columns, apart);
      visit(row, tile.first_row + i);
    }
  });
}

}  // namespace

template <class T>
void softmax_rows(const Cells<T>& cells, const Tile<T>& tile, const double* row_weights, const RowSums& sums,
                  Report& report) {
  visit_rows(cells, tile, report, [&](Row<T>& row, int64_t r) {
    sums.mass[r] = sums.loss[r] = 0;
    row.add_targets(sums.mass[r], sums.loss[r]);
    sums.logsumexp[r] = row.logsumexp(true);
    row.differentiate_kept(sums.logsumexp[r], sums.mass[r], row_weights[r]);
  });
}

template <class T>
void softmax_tile(const Cells<T>& cells, const Tile<T>& tile, const RowSums& sums, Report& report) {
  visit_rows(cells, tile, report, [&](Row<T>& row, int64_t r) {
    row.add_targets(sums.mass[r], sums.loss[r]);
    sums.logsumexp[r] = log_add(sums.logsumexp[r], row.logsumexp(false));
  });
}

template <class T>
void softmax_tile_backward(const Cells<T>& cells, const Tile<T>& tile, const double* row_weights,
                           const double* logsumexp, const double* mass, Report& report) {
  visit_rows(cells, tile, report,
             [&](Row<T>& row, int64_t r) { row.differentiate(logsumexp[r], mass[r], row_weights[r]); });
}

template <class T>
void sigmoid_tile(const Cells<T>& cells, const Tile<T>& tile, double* loss, Report& report) {
  visit_rows(cells, tile, report, [&](Row<T>& row, int64_t r) { loss[r] += row.sigmoid_loss(); });
}

template <class T>
void sigmoid_tile_backward(const Cells<T>& cells, const Tile<T>& tile, const double* row_weights, double* loss,
                           Report& report) {
  visit_rows(cells, tile, report, [&](Row<T>& row, int64_t r) {
    loss[r] += row.differentiate_sigmoid(row_weights[r]);
  });
}

#define FASTQT_INSTANTIATE(T)                                                                                    \
  template void softmax_rows(const Cells<T>&, const Tile<T>&, const double*, const RowSums&, Report&);           \
  template void softmax_tile(const Cells<T>&, const Tile<T>&, const RowSums&, Report&);                          \
  template void softmax_tile_backward(const Cells<T>&, const Tile<T>&, const double*, const double*, const double*, \
                                      Report&);                                                                  \
  template void sigmoid_tile(const Cells<T>&, const Tile<T>&, double*, Report&);                                 \
  template void sigmoid_tile_backward(const Cells<T>&, const Tile<T>&, const double*, double*, Report&);
FASTQT_INSTANTIATE(float)
FASTQT_INSTANTIATE(double)

}  // namespace fastqt
