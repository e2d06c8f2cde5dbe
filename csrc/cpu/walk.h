// A walk over the score matrix, tile by tile. The walk makes the matrix products: it computes the scores of a tile,
// calls a function that turns them into their gradient dS, and adds what dS gives to the gradients of the inputs.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "cpu/matrix.h"
#include "cpu/norms.h"
#include "cpu/parallel.h"
#include "cpu/row_passes.h"
#include "cpu/score_tile.h"

namespace fastqt {

struct Embeddings {
  const Tensor& queries;
  const Tensor& candidates;
  const std::optional<Tensor>& negatives;
  const std::optional<Tensor>& row_negatives;
};

// The tensors that the gradients are written to; one that is not needed has no tensor.
struct Gradients {
  std::optional<Tensor> queries;
  std::optional<Tensor> candidates;
  std::optional<Tensor> negatives;
  std::optional<Tensor> row_negatives;
  std::optional<Tensor> scale;
  std::optional<Tensor> bias;
};

// Columns of the score matrix. All rows share the candidates and the negatives. The row negatives are one column,
// in which each row has an embedding of its own.
template <class T>
struct Block {
  Tensor embeddings;
  std::optional<Tensor> gradient;
  Range columns;
  bool is_row_negatives;
  std::optional<UnitRows<T>> unit;  // the embeddings again, where they count at norm 1
};

template <class T>
class Walk {
 public:
  // With `normalize`, the rows of all embeddings count at norm 1.
  Walk(const Embeddings& given, double scale, const Gradients& gradients, bool normalize)
      : scale_(scale), gradients_(gradients), queries_(with_blas_layout(given.queries)) {
    const auto add = [&](const Tensor& embeddings, const std::optional<Tensor>& gradient, int64_t columns) {
      blocks_.push_back({embeddings, gradient, {width_, width_ + columns}, false, {}});
      width_ += columns;
    };
    add(with_blas_layout(given.candidates), gradients.candidates, given.candidates.size(0));
    if (given.negatives) add(with_blas_layout(*given.negatives), gradients.negatives, given.negatives->size(0));
    if (given.row_negatives) {
      add(with_adjacent_columns(*given.row_negatives), gradients.row_negatives, 1);
      blocks_.back().is_row_negatives = true;
    }
    for (const auto* written :
         {&gradients.queries, &gradients.candidates, &gradients.negatives, &gradients.row_negatives})
      ask_for_large_pages(*written);
    if (given.row_negatives || gradients.scale) queries_ = with_adjacent_columns(queries_);
    if (normalize) find_norms();
  }

  // Calls visit() for each tile of at most rows x columns, none of which has columns of two blocks. visit() reads
  // the scores from tile(), and may write their gradient there. What visit() leaves of the last `kept` tiles stays
  // for `for_tiles_again`.
  template <class F>
  void for_tiles(int64_t rows, int64_t columns, const F& visit, int64_t kept = 1) {
    list_tiles(rows, columns);
    kept_ = std::min<int64_t>(kept, places_.size());
    allocate_workspace(rows, columns, kept_);
    begin_at(0);
    for (std::size_t k = 0; k < places_.size(); ++k) {
      enter_tile(k);
      score();
      visit();
    }
  }

  // Calls visit(kept) for the same tiles once more, in the opposite order. Tiles that are not kept have their scores
  // computed again.
  template <class F>
  void for_tiles_again(const F& visit) {
    begin_at(places_.size() - 1);
    for (std::size_t k = places_.size(); k-- > 0;) {
      const bool kept = slot(k) > 0 || k + kept_ == places_.size();
      enter_tile(k);
      if (!kept) score();
      visit(kept);
    }
  }

  // The same with tiles of whole rows, which have the columns of all blocks.
  template <class F>
  void for_chunks(int64_t rows, const F& visit) {
    allocate_workspace(rows, width_);
    first_row_ = first_column_ = 0;
    for_ranges(queries_.size(0), rows, [&](Range range) {
      enter_rows(range);
      columns_ = {0, width_};
      scores_ = part(workspace_, 0, {0, range.size()});
      parts_.clear();
      for (const Block<T>& block : blocks_)
        parts_.push_back({&block, {0, block.columns.size()}, part(scores_, 1, block.columns)});
      score();
      visit();
    });
  }

  // The tile that is visited.
  Tile<T> tile() const {
    Tile<T> made{scores_.template mutable_data_ptr<T>(), scores_.stride(0), rows_.begin, rows_.size(), columns_.begin,
                 columns_.size()};
    if (unit_queries_) {
      made.row_factors = unit_queries_->inverse_norms().data() + rows_.begin;
      made.column_factors = column_factors_.data() + columns_.begin;
    }
    return made;
  }

  // Adds this tile's share to all gradients. The tile now holds dS, the gradient of its scores, times its factors.
  void differentiate() {
    for (const Part& p : parts_)
      if (p.block->gradient) add_to_columns(p);
    if (gradients_.bias && columns_.begin < blocks_.front().columns.end) add_to_bias(parts_.front());
    if (gradients_.scale) {
      add_to_scale();
    } else if (gradients_.queries) {
      add_to_queries(part(*gradients_.queries, 0, rows_), rows_have_gradient(), scale_);
    }
  }

  // Finishes the gradients of rows that count at norm 1, once all tiles have been visited.
  void finish() const {
    if (!unit_queries_) return;
    if (gradients_.queries) unit_queries_->finish_gradient(*gradients_.queries);
    for (const Block<T>& block : blocks_)
      if (block.gradient) block.unit->finish_gradient(*block.gradient);
    if (!gradients_.bias) return;
    T* const bias = gradients_.bias->template mutable_data_ptr<T>();
    for (int64_t j = 0; j < blocks_.front().columns.size(); ++j) bias[j] /= column_factors_[j];
  }

 private:
  // The columns that the tile has of one block, counted from the first of the block, and their scores.
  struct Part {
    const Block<T>* block;
    Range columns;
    Tensor scores;
  };

  // Where a tile is: its columns are counted from the first of their block.
  struct Place {
    Range rows;
    const Block<T>* block;
    Range columns;
  };

  void list_tiles(int64_t rows, int64_t columns) {
    places_.clear();
    for_ranges(queries_.size(0), rows, [&](Range row_range) {
      for (const Block<T>& block : blocks_)
        for_ranges(block.columns.size(), columns, [&](Range range) { places_.push_back({row_range, &block, range}); });
    });
  }

  // Where in the workspace the k-th tile is: the last tiles have slots of their own, the others share the first.
  int64_t slot(std::size_t k) const {
    return std::max<int64_t>(0, static_cast<int64_t>(k) - static_cast<int64_t>(places_.size()) + kept_);
  }

  void enter_tile(std::size_t k) {
    const Place& at = places_[k];
    const int64_t begin = slot(k) * tile_rows_, offset = at.block->columns.begin;
    enter_rows(at.rows);
    columns_ = {offset + at.columns.begin, offset + at.columns.end};
    scores_ = part(part(workspace_, 0, {begin, begin + at.rows.size()}), 1, {0, at.columns.size()});
    parts_.assign(1, {at.block, at.columns, scores_});
  }

  void begin_at(std::size_t k) {
    first_row_ = places_[k].rows.begin;
    first_column_ = places_[k].block->columns.begin + places_[k].columns.begin;
  }

  // Whether tiles that were visited before have added to the gradients of this tile's rows, or of its columns.
  bool rows_have_gradient() const { return columns_.begin != first_column_; }
  bool columns_have_gradient() const { return rows_.begin != first_row_; }

  void allocate_workspace(int64_t rows, int64_t columns, int64_t slots = 1) {
    tile_rows_ = std::min(rows, queries_.size(0));
    workspace_ = new_matrix(queries_, slots * tile_rows_, std::min(columns, width_));
    ask_for_large_pages(workspace_);
    if (gradients_.bias) allocate_row_weights();
    if (gradients_.scale) unscaled_queries_ = new_matrix(queries_, tile_rows_, queries_.size(1));
  }

  void find_norms() {
    unit_queries_.emplace(queries_);
    queries_ = unit_queries_->rows();
    for (Block<T>& block : blocks_) {
      block.unit.emplace(block.embeddings);
      block.embeddings = block.unit->rows();
      // Of the row negatives each row has its own factor, which the functions below apply.
      const std::vector<T>& factors = block.unit->inverse_norms();
      if (block.is_row_negatives) column_factors_.push_back(T(1));
      else column_factors_.insert(column_factors_.end(), factors.begin(), factors.end());
    }
  }

  // The weights of the rows of dS in the gradient of the biases, which takes the rows' factors off again.
  void allocate_row_weights() {
    row_weights_ = new_matrix(queries_, 1, queries_.size(0));
    torch::stable::fill_(row_weights_, 1);
    if (!unit_queries_) return;
    T* const weights = row_weights_.template mutable_data_ptr<T>();
    for (int64_t i = 0; i < queries_.size(0); ++i) weights[i] = 1 / unit_queries_->inverse_norms()[i];
  }

  // The factor of a row's own negative.
  static double factor_of(const Block<T>& row_negatives, int64_t row) {
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

  void score() const {
    for (const Part& p : parts_) {
      if (!p.block->is_row_negatives) {
        multiply(p.scores, tile_queries_, transposed(part(p.block->embeddings, 0, p.columns)), 0, scale_);
        continue;
      }
      const RowsOf<T> f(tile_queries_), g(p.block->embeddings), scores(p.scores);
      for_rows([&](int64_t i) {
        const int64_t row = rows_.begin + i;
        *scores[i] = static_cast<T>(scale_ * factor_of(*p.block, row) * row_dot(f[i], g[row], f.width));
      });
    }
  }

  void add_to_columns(const Part& p) const {
    if (!p.block->is_row_negatives) {
      const Tensor gradient = part(*p.block->gradient, 0, p.columns);
      return multiply(gradient, transposed(p.scores), tile_queries_, columns_have_gradient(), scale_);
    }
    const RowsOf<T> f(tile_queries_), dS(p.scores), gradient(*p.block->gradient);
    for_rows([&](int64_t i) {
      const int64_t row = rows_.begin + i;
      row_multiple(gradient[row], f[i], f.width, static_cast<T>(scale_ * factor_of(*p.block, row) * *dS[i]), false);
    });
  }

  void add_to_bias(const Part& candidates) const {
    const Tensor& whole = *gradients_.bias;
    const Tensor gradient =
        view(whole, {1, candidates.columns.size()}, {0, whole.stride(0)}, candidates.columns.begin * whole.stride(0));
    multiply(gradient, part(row_weights_, 1, rows_), candidates.scores, columns_have_gradient(), 1);
  }

  // Adds factor * dS G to `out`, or writes it there where `add` is false.
  void add_to_queries(const Tensor& out, bool add, double factor) const {
    for (const Part& p : parts_) {
      if (!p.block->is_row_negatives) {
        multiply(out, p.scores, part(p.block->embeddings, 0, p.columns), add, factor);
      } else {
        const RowsOf<T> dS(p.scores), g(p.block->embeddings), to(out);
        for_rows([&](int64_t i) {
          const int64_t row = rows_.begin + i;
          row_multiple(to[i], g[row], to.width, static_cast<T>(factor * factor_of(*p.block, row) * *dS[i]), add);
        });
      }
      add = true;
    }
  }

  // The gradient of the scale is <F, dS G>, so that dS G is needed without the factor s. The gradient of the
  // queries is s times the same product, which is not computed twice.
  void add_to_scale() {
    const Tensor unscaled = part(unscaled_queries_, 0, {0, rows_.size()});
    add_to_queries(unscaled, false, 1);
    const RowsOf<T> f(tile_queries_), from(unscaled);
    std::vector<double> dots(rows_.size());
    for_rows([&](int64_t i) { dots[i] = row_dot(f[i], from[i], f.width); });
    double& total = *gradients_.scale->template mutable_data_ptr<double>();
    total = std::accumulate(dots.begin(), dots.end(), rows_have_gradient() || columns_have_gradient() ? total : 0.0);
    if (!gradients_.queries) return;
    const RowsOf<T> to(*gradients_.queries);
    for_rows([&](int64_t i) {
      row_multiple(to[rows_.begin + i], from[i], f.width, static_cast<T>(scale_), rows_have_gradient());
    });
  }

  const double scale_;
  const Gradients gradients_;
  Tensor queries_;
  std::optional<UnitRows<T>> unit_queries_;  // the queries again, where they count at norm 1
  std::vector<Block<T>> blocks_;
  std::vector<T> column_factors_;
  int64_t width_ = 0;

  std::vector<Place> places_;  // of all tiles, in the order of `for_tiles`
  int64_t kept_ = 1, tile_rows_ = 0;
  int64_t first_row_ = 0, first_column_ = 0;  // of the tile that is visited first
  Tensor workspace_, unscaled_queries_, row_weights_;
  Range rows_{}, columns_{};  // of the tile that is visited
  Tensor tile_queries_, scores_;
  std::vector<Part> parts_;
};

}  // namespace fastqt
