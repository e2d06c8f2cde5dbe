#include "cpu/score_tile.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/log_sums.h"
#include "cpu/parallel.h"
#include "cpu/row_passes.h"

// The exact cells of a row are its targets and its replaced diagonal. They are few, and are
// computed one by one in double: in fp32 w * (rho * p - t) has no correct digit left once a
// positive is learnt and p is close to t. The vector passes, which compute all other cells, find
// -inf in their place.

namespace fastqt {
namespace {

struct ExactCell {
  int64_t offset;  // within the row of the tile
  double target;
  double score;
  bool replaced;  // a diagonal whose score is 0 whatever the embeddings are, so that its gradient
                  // is 0
};

// 1 / (1 + exp(-x)) - t, in a form that does not cancel where the sigmoid is close to t = 1.
double sigmoid_minus(double x, double t) {
  const double e = std::exp(-std::abs(x));
  return (x > 0 ? (1 - t) - t * e : (1 - t) * e - t) / (1 + e);
}

// One row of a tile: its scores in the dtype of the computation, and its exact cells.
template <class S>
class Row {
  using T = Computed<S>;

 public:
  Row(const Cells<T>& cells, Report& report, const Tile<S>& tile, int64_t i, T* scores,
      std::vector<ExactCell>& exact)
      : cells_(cells), report_(report), tile_(tile), scores_(scores), row_(tile.first_row + i),
        first_(tile.first_column), width_(tile.columns),
        candidates_(std::clamp<int64_t>(cells.candidates - first_, 0, width_)),
        background_(cells.background == nullptr ? 0 : cells.background[row_]),
        has_row_score_(cells.row_score != nullptr && first_ == 0),
        row_score_(has_row_score_ ? cells.row_score[row_] : -kInfinity), exact_(exact) {
    exact_.clear();
    collect_targets();
    if (cells.thresholds != nullptr) filter();
    if (cells.bias != nullptr) row_add(scores_, cells.bias + first_, candidates_);
    if (background_ > 0) background_scores_ = row_sum(scores_, candidates_);
    take_out_targets();
    if (kRounds<S> || targets_cancel()) score_targets();
    apply_diagonal();
    apply_exclusions();
  }

  // The logsumexp of the row. With `keep`, the other cells become exp(score - row_shift).
  double logsumexp(bool keep) {
    double largest = std::max<double>(row_max(scores_, width_), row_score_);
    for (const ExactCell& cell : exact_) largest = cell.score > largest ? cell.score : largest;
    if (largest == -kInfinity) return sum_of_scores();
    const T shift = static_cast<T>(largest);
    double total = keep ? row_exp(scores_, width_, shift) : row_exp_sum(scores_, width_, shift);
    total += std::exp(row_score_ - shift);
    for (const ExactCell& cell : exact_) total += std::exp(cell.score - shift);
    row_shift_ = shift;
    return row_shift_ + std::log(total);
  }

  // Adds this tile's part of the target mass, sum_j T_ij, and of sum_j T_ij (log T_ij - s_ij).
  void add_targets(double& mass, double& linear) const {
    const double mass_before = mass;
    int64_t exact_candidates = 0;
    for (const ExactCell& cell : exact_) {
      exact_candidates += cell.offset < candidates_;
      if (cell.target == 0) continue;
      mass += cell.target;
      linear += cell.target * (std::log(cell.target) - cell.score);
    }
    if (background_ > 0) {
      const auto others = static_cast<double>(candidates_ - exact_candidates);
      mass += others * background_;
      linear += background_ * (others * std::log(background_) - background_scores_);
    }
    if (mass == kInfinity) report_infinite(mass_before);
  }

  // Turns the exponentials that logsumexp(true) has left into the gradient w * (rho * p - t).
  void differentiate_kept(double logsumexp, double mass, double weight) {
    if (has_no_gradient(logsumexp, mass)) return clear();
    write_other_cells(weight * mass * std::exp(row_shift_ - logsumexp), weight);
    write_exact_cells(logsumexp, mass, weight);
    write_row_score(weight * mass * std::exp(row_score_ - logsumexp));
  }

  // Turns scores into the same gradient.
  void differentiate(double logsumexp, double mass, double weight) {
    if (has_no_gradient(logsumexp, mass)) return clear();
    const T shift = static_cast<T>(logsumexp);
    row_exp(scores_, width_, shift);
    write_other_cells(weight * mass * std::exp(static_cast<double>(shift) - logsumexp), weight);
    write_exact_cells(logsumexp, mass, weight);
    write_row_score(weight * mass * std::exp(row_score_ - logsumexp));
  }

  // sum_j log(1 + exp(s_ij)) - T_ij s_ij
  double sigmoid_loss() const {
    return row_softplus_sum(scores_, width_) + softplus(row_score_) + sigmoid_loss_of_targets();
  }

  // Returns the same, and turns the scores into the gradient w * (sigmoid - t).
  double differentiate_sigmoid(double weight) {
    const auto w = static_cast<T>(weight);
    const double softplus_sum =
        row_sigmoid(scores_, candidates_, w, static_cast<T>(weight * background_)) +
        row_sigmoid(scores_ + candidates_, width_ - candidates_, w, T(0));
    for (const ExactCell& cell : exact_)
      scores_[cell.offset] =
          cell.replaced ? T(0) : static_cast<T>(weight * sigmoid_minus(cell.score, cell.target));
    write_row_score(weight * sigmoid_minus(row_score_, 0));
    return softplus_sum + softplus(row_score_) + sigmoid_loss_of_targets();
  }

 private:
  // -inf of a row that has no other scores, and NaN if one of them is NaN, which a maximum does not
  // show.
  double sum_of_scores() const {
    double total = row_score_ + row_sum(scores_, width_);
    for (const ExactCell& cell : exact_) total += cell.score;
    return total;
  }

  // A row without targets, or one of which nothing is left. One whose targets have scores of -inf
  // is neither: its loss and its gradient are NaN.
  bool has_no_gradient(double logsumexp, double mass) const {
    return mass == 0 || (logsumexp == -kInfinity && exact_.empty());
  }

  void add_target(int64_t column, double target) {
    if (target == 0) return;
    if (!(target > 0 && target < kInfinity))
      return report_(target == kInfinity ? kTargetNotFinite : kTargetNotPositive, row_, column);
    if (column < 0 || column >= cells_.candidates) return report_(kTargetOutside, row_, column);
    if (column < first_ || column >= first_ + width_) return;
    if (column == row_ && cells_.diagonal != kKeep) return report_(kTargetOnDiagonal, row_, column);
    if (cells_.masked(row_, column)) return report_(kTargetMasked, row_, column);
    exact_.push_back({column - first_, target + background_, 0.0, false});
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

  // Lets the cells leave whose scores are above the limit of the row, but no target. Scores have no
  // biases yet.
  void filter() {
    for (ExactCell& cell : exact_) cell.score = scores_[cell.offset];
    row_exclude_above(scores_, width_, cells_.scale * cells_.thresholds[row_]);
    for (const ExactCell& cell : exact_) scores_[cell.offset] = static_cast<T>(cell.score);
  }

  // Reports the target with which the mass becomes infinite.
  void report_infinite(double mass) const {
    int64_t offset = 0;
    for (const ExactCell& cell : exact_) {
      offset = cell.offset;
      if ((mass += cell.target) == kInfinity) break;
    }
    report_(kTargetNotFinite, row_, first_ + offset);
  }

  void take_out(ExactCell& cell) {
    cell.score = scores_[cell.offset];
    scores_[cell.offset] = -std::numeric_limits<T>::infinity();
  }

  void take_out_targets() {
    double total = 0;
    for (ExactCell& cell : exact_) {
      take_out(cell);
      total += cell.score;
    }
    // Compressed rows may name a column twice. The second time its score is -inf.
    if (!(total > -kInfinity)) total = sum_repeated_targets();
    background_scores_ -= total;
  }

  // Whether the row's targets are learnt so well that p and t of each differ by little more than
  // the rounding of their scores. Those of a single target do not: where it is learnt, p is 1,
  // whatever its score is. Many targets would take too much time.
  bool targets_cancel() const {
    constexpr double kNear = 1.0 / 256;  // of the largest score
    const auto here = static_cast<int64_t>(exact_.size());
    if (sizeof(S) == 8 || tile_.queries == nullptr || here > std::max<int64_t>(8, width_ / 64))
      return false;
    // How near the others are is not known where they are in other tiles.
    const int64_t all =
        cells_.row_starts == nullptr ? here : cells_.row_starts[row_ + 1] - cells_.row_starts[row_];
    if (here < 2 || here < all) return here > 0 && here < all;
    double least = kInfinity, most = -kInfinity, largest = 0;
    for (const ExactCell& cell : exact_) {
      const double above = cell.score - std::log(cell.target);
      least = std::min(least, above), most = std::max(most, above);
      largest = std::max(largest, std::abs(cell.score));
    }
    return most - least < kNear * largest;
  }

  // Replaces the targets' scores by those of the embeddings in double.
  void score_targets() {
    // A score is rounded to T, as the shift of a row is, where one above it by less than that would
    // overflow.
    constexpr double kMostUnrounded = kRounds<S> ? 0 : 0x1p17;
    for (ExactCell& cell : exact_) {
      const double bias = cells_.bias == nullptr ? 0 : cells_.bias[first_ + cell.offset];
      cell.score = tile_.unrounded(row_ - tile_.first_row, cell.offset) + bias;
      if (!(std::abs(cell.score) < kMostUnrounded)) cell.score = static_cast<T>(cell.score);
    }
  }

  // Makes one exact cell of those of a column, with the score that the first has found. Returns the
  // sum of the scores that are not -inf.
  double sum_repeated_targets() {
    std::stable_sort(exact_.begin(), exact_.end(),
                     [](const ExactCell& a, const ExactCell& b) { return a.offset < b.offset; });
    std::size_t kept = 0;
    double total = 0;
    for (const ExactCell& cell : exact_) {
      if (kept > 0 && exact_[kept - 1].offset == cell.offset) {
        exact_[kept - 1].target += cell.target - background_;
        continue;
      }
      if (cell.score != -kInfinity) total += cell.score;
      exact_[kept++] = cell;
    }
    exact_.resize(kept);
    return total;
  }

  void apply_diagonal() {
    const int64_t offset = row_ - first_;
    if (cells_.diagonal == kKeep || offset < 0 || offset >= candidates_) return;
    ExactCell cell{offset, background_, 0.0, true};
    take_out(cell);
    if (cell.score != -kInfinity) background_scores_ -= cell.score;
    if (cells_.diagonal == kExclude || cells_.masked(row_, row_) || cells_.same_group(row_, row_))
      return;
    cell.score = 0;
    exact_.push_back(cell);
  }

  void apply_exclusions() {
    if (cells_.query_groups != nullptr)
      row_exclude_group(scores_, cells_.candidate_groups + first_, candidates_,
                        cells_.query_groups[row_]);
    if (cells_.mask != nullptr)
      for (int64_t j = 0; j < candidates_; ++j)
        if (cells_.masked(row_, first_ + j)) scores_[j] = -std::numeric_limits<T>::infinity();
  }

  // The loss of the exact cells, and the term -T_ij s_ij of the others, whose target is the
  // background.
  double sigmoid_loss_of_targets() const {
    double total = background_ > 0 ? -background_ * background_scores_ : 0;
    for (const ExactCell& cell : exact_) total += softplus(cell.score) - cell.target * cell.score;
    return total;
  }

  void clear() {
    std::fill(scores_, scores_ + width_, T(0));
    write_row_score(0);
  }

  void write_row_score(double gradient) {
    if (has_row_score_ && cells_.row_score_gradient != nullptr)
      cells_.row_score_gradient[row_] = static_cast<T>(gradient);
  }

  void write_other_cells(double factor, double weight) {
    const auto f = static_cast<T>(factor);
    row_affine(scores_, candidates_, f, static_cast<T>(weight * background_));
    row_affine(scores_ + candidates_, width_ - candidates_, f, T(0));
  }

  void write_exact_cells(double logsumexp, double mass, double weight) {
    for (const ExactCell& cell : exact_)
      scores_[cell.offset] =
          cell.replaced
              ? T(0)
              : static_cast<T>(weight * (mass * std::exp(cell.score - logsumexp) - cell.target));
  }

  const Cells<T>& cells_;
  Report& report_;
  const Tile<S>& tile_;
  T* const scores_;
  const int64_t row_, first_, width_, candidates_;
  const double background_;
  double background_scores_ = 0;  // the sum of the scores whose target is the background alone
  double row_shift_ = 0;
  const bool has_row_score_;
  const double row_score_;  // -inf where this tile has none
  std::vector<ExactCell>& exact_;
};

// Calls visit(row, index) for all rows of a tile, on several threads, and writes the rows back
// where that changes them.
template <class S, class F>
void visit_rows(const Cells<Computed<S>>& cells, const Tile<S>& tile, Report& report, bool changes,
                const F& visit) {
  in_parallel(tile.rows, tile.columns, [&](int64_t begin, int64_t end) {
    std::vector<ExactCell> exact;
    ComputedRow<S> computed(tile.columns);
    for (int64_t i = begin; i < end; ++i) {
      S* const stored = tile.scores + i * tile.row_stride;
      Computed<S>* const scores = computed.read(stored, tile.columns);
      tile.scale_row(i, scores);
      Row<S> row(cells, report, tile, i, scores, exact);
      visit(row, tile.first_row + i);
      if (!changes) continue;
      tile.scale_row(i, scores);
      computed.write(stored, tile.columns);
    }
  });
}

}  // namespace

template <class S>
void softmax_rows(const Cells<Computed<S>>& cells, const Tile<S>& tile, const double* row_weights,
                  const RowSums& sums, Report& report) {
  visit_rows(cells, tile, report, true, [&](Row<S>& row, int64_t r) {
    row.add_targets(sums.mass[r], sums.loss[r]);
    sums.logsumexp[r] = row.logsumexp(true);
    row.differentiate_kept(sums.logsumexp[r], sums.mass[r], row_weights[r]);
  });
}

template <class S>
void softmax_tile(const Cells<Computed<S>>& cells, const Tile<S>& tile, const RowSums& sums,
                  Report& report) {
  visit_rows(cells, tile, report, false, [&](Row<S>& row, int64_t r) {
    row.add_targets(sums.mass[r], sums.loss[r]);
    sums.logsumexp[r] = log_add(sums.logsumexp[r], row.logsumexp(false));
  });
}

template <class S>
void softmax_tile_backward(const Cells<Computed<S>>& cells, const Tile<S>& tile,
                           const double* row_weights, const double* logsumexp, const double* mass,
                           Report& report) {
  visit_rows(cells, tile, report, true, [&](Row<S>& row, int64_t r) {
    row.differentiate(logsumexp[r], mass[r], row_weights[r]);
  });
}

template <class S>
void sigmoid_tile(const Cells<Computed<S>>& cells, const Tile<S>& tile, double* loss,
                  Report& report) {
  visit_rows(cells, tile, report, false,
             [&](Row<S>& row, int64_t r) { loss[r] += row.sigmoid_loss(); });
}

template <class S>
void sigmoid_tile_backward(const Cells<Computed<S>>& cells, const Tile<S>& tile,
                           const double* row_weights, double* loss, Report& report) {
  visit_rows(cells, tile, report, true,
             [&](Row<S>& row, int64_t r) { loss[r] += row.differentiate_sigmoid(row_weights[r]); });
}

#define FASTQT_INSTANTIATE(S)                                                                     \
  template void softmax_rows(const Cells<Computed<S>>&, const Tile<S>&, const double*,            \
                             const RowSums&, Report&);                                            \
  template void softmax_tile(const Cells<Computed<S>>&, const Tile<S>&, const RowSums&, Report&); \
  template void softmax_tile_backward(const Cells<Computed<S>>&, const Tile<S>&, const double*,   \
                                      const double*, const double*, Report&);                     \
  template void sigmoid_tile(const Cells<Computed<S>>&, const Tile<S>&, double*, Report&);        \
  template void sigmoid_tile_backward(const Cells<Computed<S>>&, const Tile<S>&, const double*,   \
                                      double*, Report&);
FASTQT_INSTANTIATE(float)
FASTQT_INSTANTIATE(double)
FASTQT_INSTANTIATE(BFloat16)

}  // namespace fastqt
