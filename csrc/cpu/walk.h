// A walk over the score matrix, tile by tile. The walk makes the matrix products: it computes the
// scores of a tile, calls a function that turns them into their gradient dS, and adds what dS gives
// to the gradients of the inputs.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "cpu/blocks.h"
#include "cpu/dtypes.h"
#include "cpu/matrix.h"
#include "cpu/norms.h"
#include "cpu/own_products.h"
#include "cpu/parallel.h"
#include "cpu/problem.h"
#include "cpu/products.h"
#include "cpu/row_passes.h"
#include "cpu/score_tile.h"

namespace fastqt {

// Embeddings of S.
template <class S>
class Walk {
 public:
  using T = Computed<S>;

  // With `normalize`, the rows of all embeddings count at norm 1.
  Walk(const Embeddings& inputs, double scale, const Gradients& gradients, bool normalize)
      : scale_(scale), gradients_(gradients), queries_(with_readable_rows(inputs.queries)) {
    const auto add = [&](const Tensor& embeddings, const std::optional<Tensor>& gradient,
                         int64_t columns) {
      blocks_.push_back({embeddings, gradient, {width_, width_ + columns}, false, {}, {}});
      width_ += columns;
    };

    add(with_readable_rows(inputs.candidates), gradients.candidates, inputs.candidates.size(0));
    if (inputs.negatives)
      add(with_blas_layout(*inputs.negatives), gradients.negatives, inputs.negatives->size(0));
    if (inputs.row_negatives) {
      add(with_adjacent_columns(*inputs.row_negatives), gradients.row_negatives, 1);
      blocks_.back().is_row_negatives = true;
    }

    for (const auto* written : {&gradients.queries, &gradients.candidates, &gradients.negatives,
                                &gradients.row_negatives})
      ask_for_large_pages(*written);
    if (inputs.row_negatives || gradients.scale) queries_ = with_adjacent_columns(queries_);
    if (normalize) find_norms();
  }

  // From now on the scores of the first rows are written to `scores` as well, (rows, width): those
  // of the tiles all of whose rows are among them.
  void keep(const Tensor& scores) { kept_scores_ = scores; }

  // From now on they are read there, where another walk with the same tiles has kept them.
  void reuse(const Tensor& scores) { known_scores_ = scores; }

  // Calls visit() for each tile of at most rows x columns, none of which has columns of two blocks.
  // visit() reads the scores from tile(), and may write their gradient there. What visit() leaves
  // of the last `kept` tiles stays for `for_tiles_again`.
  template <class F>
  void for_tiles(int64_t rows, int64_t columns, const F& visit, int64_t kept = 1) {
    list_tiles(rows, columns);
    kept_ = std::min<int64_t>(kept, places_.size());
    allocate_workspace(rows, columns, kept_);
    begin_at(0);
    for (std::size_t k = 0; k < places_.size(); ++k) {
      enter_tile(k);
      find_scores();
      visit();
      if (k + 1 == places_.size() || places_[k + 1].rows.begin != rows_.begin) leave_rows();
    }
  }

  // Calls visit(kept) for the same tiles once more, in the opposite order. Tiles that are not kept
  // have their scores computed again.
  template <class F>
  void for_tiles_again(const F& visit) {
    begin_at(places_.size() - 1);
    for (std::size_t k = places_.size(); k-- > 0;) {
      const bool kept = slot(k) > 0 || k + kept_ == places_.size();
      enter_tile(k);
      if (!kept) find_scores();
      visit(kept);
      if (k == 0 || places_[k - 1].rows.begin != rows_.begin) leave_rows();
    }
    first_row_ = first_column_ = 0;
  }

  // The same with tiles of whole rows, which have the columns of all blocks.
  template <class F>
  void for_chunks(int64_t rows, const F& visit) {
    allocate_workspace(rows, width_);
    for_ranges(queries_.size(0), rows, [&](Range range) {
      enter_rows(range);
      columns_ = {0, width_};
      scores_ = part(workspace_, 0, {0, range.size()});
      parts_.clear();
      for (const Block<S>& block : blocks_)
        parts_.push_back({&block, {0, block.columns.size()}, part(scores_, 1, block.columns)});
      find_scores();
      visit();
      leave_rows();
    });
  }

  // The tile that is visited.
  Tile<S> tile() const {
    Tile<S> made{static_cast<S*>(scores_.data_ptr()),
                 scores_.stride(0),
                 rows_.begin,
                 rows_.size(),
                 columns_.begin,
                 columns_.size()};
    if (unit_queries_) {
      made.row_factors = unit_queries_->inverse_norms().data() + rows_.begin;
      made.column_factors = column_factors_.data() + columns_.begin;
    }
    const Tensor& embeddings = blocks_.front().embeddings;
    const bool readable = queries_.stride(1) == 1 && embeddings.stride(1) == 1;
    if (readable && columns_.begin < blocks_.front().columns.end) {
      const RowsOf<S> queries(queries_), candidates(embeddings);
      made.queries = queries[rows_.begin], made.query_stride = queries.stride;
      made.candidates = candidates[columns_.begin], made.candidate_stride = candidates.stride;
      made.width = queries.width, made.scale = scale_;
      if (unit_queries_) {
        made.unrounded_row_factors = unit_queries_->unrounded_inverse_norms().data() + rows_.begin;
        made.unrounded_column_factors =
            blocks_.front().unit->unrounded_inverse_norms().data() + columns_.begin;
      }
    }
    return made;
  }

  // Adds this tile's share to all gradients. The tile now holds dS, the gradient of its scores,
  // times its factors.
  void differentiate() {
    for (const Part& p : parts_)
      if (p.block->gradient) add_to_columns(p);
    if (gradients_.bias && columns_.begin < blocks_.front().columns.end)
      add_to_bias(parts_.front());
    if (queries_sum_) {
      add_to_queries(part(*queries_sum_, 0, {0, rows_.size()}), 1);
      has_sum_ = true;
    } else if (gradients_.queries) {
      add_to_queries(part(*gradients_.queries, 0, rows_), scale_);
    }
  }

  // Finishes the gradients once all tiles have been visited.
  void finish() const {
    for (const Block<S>& block : blocks_)
      if (block.sum) write_sum<S>(*block.gradient, {0, block.columns.size()}, *block.sum, scale_);
    if (!unit_queries_) return;
    if (gradients_.queries) unit_queries_->finish_gradient(*gradients_.queries);
    for (const Block<S>& block : blocks_)
      if (block.gradient) block.unit->finish_gradient(*block.gradient);
    if (!gradients_.bias) return;
    T* const bias = gradients_.bias->template mutable_data_ptr<T>();
    for (int64_t j = 0; j < blocks_.front().columns.size(); ++j) bias[j] /= column_factors_[j];
  }

 private:
  // The columns that the tile has of one block, counted from the first of the block, and their
  // scores.
  struct Part {
    const Block<S>* block;
    Range columns;
    Tensor scores;
  };

  // Targets in bfloat16 are scored from the rows themselves.
  static Tensor with_readable_rows(const Tensor& matrix) {
    return kRounds<S> ? with_adjacent_columns(matrix) : with_blas_layout(matrix);
  }

  // Where a tile is: its columns are counted from the first of their block.
  struct Place {
    Range rows;
    const Block<S>* block;
    Range columns;
  };

  void list_tiles(int64_t rows, int64_t columns) {
    places_.clear();
    for_ranges(queries_.size(0), rows, [&](Range row_range) {
      for (const Block<S>& block : blocks_)
        for_ranges(block.columns.size(), columns,
                   [&](Range range) { places_.push_back({row_range, &block, range}); });
    });
  }

  // Where in the workspace the k-th tile is: the last tiles have slots of their own, the others
  // share the first.
  int64_t slot(std::size_t k) const {
    return std::max<int64_t>(
        0, static_cast<int64_t>(k) - static_cast<int64_t>(places_.size()) + kept_);
  }

  // Rows of the workspace from `begin` on, for a tile. In bfloat16 they follow each other, so that
  // torch's products need no copy of a tile that is narrower than others.
  Tensor tile_at(int64_t begin, int64_t rows, int64_t columns) const {
    const Tensor all = part(workspace_, 0, {begin, begin + rows});
    if (!kRounds<S> || columns == workspace_.size(1)) return part(all, 1, {0, columns});
    return view(all, {rows, columns}, {columns, 1}, 0);
  }

  void enter_tile(std::size_t k) {
    const Place& at = places_[k];
    const int64_t begin = slot(k) * tile_rows_, offset = at.block->columns.begin;
    enter_rows(at.rows);
    columns_ = {offset + at.columns.begin, offset + at.columns.end};
    scores_ = tile_at(begin, at.rows.size(), at.columns.size());
    parts_.assign(1, {at.block, at.columns, scores_});
  }

  void begin_at(std::size_t k) {
    first_row_ = places_[k].rows.begin;
    first_column_ = places_[k].block->columns.begin + places_[k].columns.begin;
  }

  // Whether tiles that were visited before have added to the gradients of this tile's rows, or of
  // its columns.
  bool rows_have_gradient() const { return columns_.begin != first_column_; }
  bool columns_have_gradient() const { return rows_.begin != first_row_; }

  void allocate_workspace(int64_t rows, int64_t columns, int64_t slots = 1) {
    const int64_t N = queries_.size(0), D = queries_.size(1);
    tile_rows_ = std::min(rows, N);
    columns = std::min(columns, width_);
    workspace_ = new_workspace(queries_, slots * tile_rows_, columns);
    int64_t products = 0;  // that a row of the queries' gradient is the sum of
    for (Block<S>& block : blocks_) {
      products += (block.columns.size() + columns - 1) / columns;
      if (kRounds<S> && rows < N && block.gradient && !block.is_row_negatives)
        block.sum = new_tensor<2>({block.columns.size(), D}, aoti_torch_dtype_float32());
    }
    if (gradients_.scale || (kRounds<S> && gradients_.queries && products > 1))
      queries_sum_ = new_tensor<2>({tile_rows_, D},
                                   kRounds<S> ? aoti_torch_dtype_float32() : dtype_of(queries_));
    if (kRounds<S>) product_ = new_matrix(queries_, std::max(tile_rows_, workspace_.size(1)), D);
  }

  void find_norms() {
    unit_queries_.emplace(queries_);
    queries_ = unit_queries_->rows();
    for (Block<S>& block : blocks_) {
      block.unit.emplace(block.embeddings);
      block.embeddings = block.unit->rows();
      // Of the row negatives each row has its own factor, which the functions below apply.
      const std::vector<T>& factors = block.unit->inverse_norms();
      if (block.is_row_negatives) column_factors_.push_back(T(1));
      else column_factors_.insert(column_factors_.end(), factors.begin(), factors.end());
    }
  }

  // The factor of a row's own negative.
  static double factor_of(const Block<S>& row_negatives, int64_t row) {
    return row_negatives.unit ? row_negatives.unit->inverse_norms()[row] : 1;
  }

  void enter_rows(Range rows) {
    rows_ = rows;
    tile_queries_ = part(queries_, 0, rows);
  }

  template <class F>
  void for_rows(const F& visit) const {
    in_parallel(rows_.size(), queries_.size(1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) visit(i);
    });
  }

  void find_scores() const {
    if (holds_rows(known_scores_)) return copy_rows(scores_, visited(*known_scores_));
    score();
    if (holds_rows(kept_scores_)) copy_rows(visited(*kept_scores_), scores_);
  }

  // Whether a matrix of the first rows has all that are visited.
  bool holds_rows(const std::optional<Tensor>& matrix) const {
    return matrix && rows_.end <= matrix->size(0);
  }

  // The part of a matrix (rows, width) that is visited.
  Tensor visited(const Tensor& matrix) const { return part(part(matrix, 0, rows_), 1, columns_); }

  void copy_rows(const Tensor& to, const Tensor& from) const {
    const RowsOf<S> target(to), source(from);
    const std::size_t bytes = columns_.size() * sizeof(S);
    for_rows([&](int64_t i) { std::memcpy(target[i], source[i], bytes); });
  }

  void score() const {
    for (const Part& p : parts_) {
      if (!p.block->is_row_negatives) {
        multiply(p.scores, tile_queries_, transposed(part(p.block->embeddings, 0, p.columns)), 0,
                 scale_);
        continue;
      }
      const RowsOf<S> f(tile_queries_), g(p.block->embeddings), scores(p.scores);
      for_rows([&](int64_t i) {
        const int64_t row = rows_.begin + i;
        *scores[i] = static_cast<S>(
            static_cast<T>(scale_ * factor_of(*p.block, row) * row_dot(f[i], g[row], f.width)));
      });
    }
  }

  void add_to_columns(const Part& p) const {
    if (!p.block->is_row_negatives) {
      const Tensor to = part(p.block->sum ? *p.block->sum : *p.block->gradient, 0, p.columns);
      const double factor = p.block->sum ? 1 : scale_;
      return add_product<S>(to, transposed(p.scores), tile_queries_, columns_have_gradient(),
                            factor, product_);
    }
    const RowsOf<S> f(tile_queries_), dS(p.scores), gradient(*p.block->gradient);
    for_rows([&](int64_t i) {
      const int64_t row = rows_.begin + i;
      const auto multiplier = static_cast<T>(scale_ * factor_of(*p.block, row) * *dS[i]);
      if constexpr (kRounds<S>) row_round(gradient[row], f[i], f.width, multiplier);
      else row_multiple(gradient[row], f[i], f.width, multiplier, false);
    });
  }

  // The gradient of a bias is the sum of its column of dS, from which the rows' factors are taken
  // off again.
  void add_to_bias(const Part& candidates) const {
    constexpr int64_t kStripe = 1024;  // columns whose sums one thread keeps at a time
    const int64_t columns = candidates.columns.size();
    const RowsOf<S> dS(candidates.scores);
    T* const bias = gradients_.bias->template mutable_data_ptr<T>() + candidates.columns.begin;
    in_parallel((columns + kStripe - 1) / kStripe, kStripe * rows_.size(),
                [&](int64_t begin, int64_t end) {
                  T sums[kStripe];
                  for_ranges(end * kStripe, kStripe, [&](Range stripe) {
                    if (stripe.begin < begin * kStripe) return;
                    const int64_t width = std::min(stripe.end, columns) - stripe.begin;
                    for (int64_t i = 0; i < rows_.size(); ++i) {
                      const double row_factor =
                          unit_queries_ ? unit_queries_->inverse_norms()[rows_.begin + i] : 1;
                      row_multiple(sums, dS[i] + stripe.begin, width,
                                   static_cast<T>(1 / row_factor), i > 0);
                    }
                    row_multiple(bias + stripe.begin, sums, width, T(1), columns_have_gradient());
                  });
                });
  }

  // Adds factor * dS G to `out`, or writes it there if this tile is the first of its rows.
  void add_to_queries(const Tensor& out, double factor) const {
    bool add = rows_have_gradient();
    for (const Part& p : parts_) {
      if (!p.block->is_row_negatives) {
        add_product<S>(out, p.scores, part(p.block->embeddings, 0, p.columns), add, factor,
                       product_);
      } else {
        const RowsOf<S> dS(p.scores), g(p.block->embeddings);
        const RowsOf<T> to(out);
        for_rows([&](int64_t i) {
          const int64_t row = rows_.begin + i;
          row_multiple(to[i], g[row], to.width,
                       static_cast<T>(factor * factor_of(*p.block, row) * *dS[i]), add);
        });
      }
      add = true;
    }
  }

  // Writes what is kept of these rows, dS G without its factor, to the gradients. That of the scale
  // is <F, dS G>.
  void leave_rows() {
    if (!has_sum_) return;
    has_sum_ = false;
    if (gradients_.scale) {
      const RowsOf<S> f(tile_queries_);
      const RowsOf<T> from(*queries_sum_);
      std::vector<double> dots(rows_.size());
      for_rows([&](int64_t i) { dots[i] = row_dot(f[i], from[i], f.width); });
      double& total = *gradients_.scale->template mutable_data_ptr<double>();
      total = std::accumulate(dots.begin(), dots.end(), columns_have_gradient() ? total : 0.0);
    }
    if (gradients_.queries) write_sum<S>(*gradients_.queries, rows_, *queries_sum_, scale_);
  }

  const double scale_;
  const Gradients gradients_;
  Tensor queries_;
  std::optional<UnitRows<S>> unit_queries_;  // the queries again, where they count at norm 1
  std::vector<Block<S>> blocks_;
  std::vector<T> column_factors_;
  int64_t width_ = 0;

  std::optional<Tensor> kept_scores_, known_scores_;
  Tensor workspace_;
  std::vector<Place> places_;
  int64_t tile_rows_ = 0, kept_ = 1;
  int64_t first_row_ = 0, first_column_ = 0;  // of the tile that was visited first
  std::optional<Tensor>
      queries_sum_;  // of products for the rows that are visited, if they are added apart
  bool has_sum_ = false;
  Tensor product_;            // rounded, on its way to a sum
  Range rows_{}, columns_{};  // of the tile that is visited
  Tensor tile_queries_, scores_;
  std::vector<Part> parts_;
};

}  // namespace fastqt
