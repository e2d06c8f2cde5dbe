// A walk over the score matrix, tile by tile: its products, whatever a loss makes of the scores.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "cpu/matrix.h"
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

// Where the gradients go that are wanted.
struct Gradients {
  const std::optional<Tensor>& queries;
  const std::optional<Tensor>& candidates;
  const std::optional<Tensor>& negatives;
  const std::optional<Tensor>& row_negatives;
  const std::optional<Tensor>& bias;
  const std::optional<Tensor>& scale;
};

// Columns of the score matrix. Candidates and negatives are everybody's; of row negatives,
// which are one column, each row has its own.
struct Block {
  Tensor embeddings;
  std::optional<Tensor> gradient;
  Range columns;
  bool is_private;
};

template <class T>
class Walk {
 public:
  Walk(const Embeddings& given, double scale, const Gradients& gradients)
      : scale_(scale), gradients_(gradients), queries_(for_blas(given.queries)) {
    const auto add = [&](const Tensor& embeddings, const std::optional<Tensor>& gradient, int64_t columns) {
      blocks_.push_back({embeddings, gradient, {width_, width_ + columns}, false});
      width_ += columns;
    };
    add(for_blas(given.candidates), gradients.candidates, given.candidates.size(0));
    if (given.negatives) add(for_blas(*given.negatives), gradients.negatives, given.negatives->size(0));
    if (given.row_negatives) {
      add(with_adjacent_rows(*given.row_negatives), gradients.row_negatives, 1);
      blocks_.back().is_private = true;
    }
    for (const auto* fresh : {&gradients.queries, &gradients.candidates, &gradients.negatives, &gradients.row_negatives})
      ask_for_large_pages(*fresh);
    if (given.row_negatives || gradients.scale) queries_ = with_adjacent_rows(queries_);
  }

  // Calls visit() on the scores of one tile after the other, which it may turn into their gradient.
  template <class F>
  void for_tiles(int64_t rows, int64_t columns, const F& visit) {
    scores_of(rows, columns);
    for_ranges(queries_.size(0), rows, [&](Range row_range) {
      enter(row_range);
      for (const Block& block : blocks_)
        for_ranges(block.columns.size(), columns, [&](Range range) {
          columns_ = {block.columns.begin + range.begin, block.columns.begin + range.end};
          scores_ = part(part(workspace_, 0, {0, row_range.size()}), 1, {0, range.size()});
          parts_.assign(1, {&block, range, scores_});
          score();
          visit();
        });
    });
  }

  // The same on tiles of whole rows.
  template <class F>
  void for_chunks(int64_t rows, const F& visit) {
    scores_of(rows, width_);
    for_ranges(queries_.size(0), rows, [&](Range range) {
      enter(range);
      columns_ = {0, width_};
      scores_ = part(workspace_, 0, {0, range.size()});
      parts_.clear();
      for (const Block& block : blocks_)
        parts_.push_back({&block, {0, block.columns.size()}, part(scores_, 1, block.columns)});
      score();
      visit();
    });
  }

  // The tile at hand.
  Tile<T> tile() const {
    return {scores_.template mutable_data_ptr<T>(), scores_.stride(0), rows_.begin, rows_.size(), columns_.begin,
            columns_.size()};
  }

  // Adds what the tile, which now holds dS, gives to the gradients.
  void differentiate() {
    for (const Part& p : parts_)
      if (p.block->gradient) add_to_own(p);
    if (gradients_.bias && columns_.begin < blocks_.front().columns.end) add_to_bias(parts_.front());
    if (gradients_.scale) {
      add_to_scale();
    } else if (gradients_.queries) {
      add_to_queries(part(*gradients_.queries, 0, rows_), columns_.begin > 0, scale_);
    }
  }

 private:
  // A block's columns that the tile has, counted from the block's first, and their scores.
  struct Part {
    const Block* block;
    Range columns;
    Tensor scores;
  };

  void scores_of(int64_t rows, int64_t columns) {
    workspace_ = new_matrix(queries_, std::min(rows, queries_.size(0)), std::min(columns, width_));
    if (gradients_.bias) {
      ones_ = new_matrix(queries_, 1, workspace_.size(0));
      torch::stable::fill_(ones_, 1);
    }
    if (gradients_.scale)
      product_ = new_matrix(queries_, workspace_.size(0), queries_.size(1));
  }

  void enter(Range rows) {
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
      if (!p.block->is_private) {
        multiply<T>(p.scores, tile_queries_, transposed(part(p.block->embeddings, 0, p.columns)), false, scale_);
        continue;
      }
      const RowsOf<T> f(tile_queries_), g(p.block->embeddings), scores(p.scores);
      for_rows([&](int64_t i) { *scores[i] = static_cast<T>(scale_ * row_dot(f[i], g[rows_.begin + i], f.width)); });
    }
  }

  void add_to_own(const Part& p) const {
    if (!p.block->is_private) {
      const Tensor gradient = part(*p.block->gradient, 0, p.columns);
      return multiply<T>(gradient, transposed(p.scores), tile_queries_, rows_.begin > 0, scale_);
    }
    const RowsOf<T> f(tile_queries_), dS(p.scores), gradient(*p.block->gradient);
    for_rows([&](int64_t i) {
      row_multiple(gradient[rows_.begin + i], f[i], f.width, static_cast<T>(scale_ * *dS[i]), false);
    });
  }

  void add_to_bias(const Part& candidates) const {
    const Tensor& whole = *gradients_.bias;
    const Tensor gradient =
        view(whole, {1, candidates.columns.size()}, {0, whole.stride(0)}, candidates.columns.begin * whole.stride(0));
    multiply<T>(gradient, part(ones_, 1, {0, rows_.size()}), candidates.scores, rows_.begin > 0, 1);
  }

  // Adds factor * dS G to `out`, or sets it to that.
  void add_to_queries(const Tensor& out, bool add, double factor) const {
    for (const Part& p : parts_) {
      if (!p.block->is_private) {
        multiply<T>(out, p.scores, part(p.block->embeddings, 0, p.columns), add, factor);
      } else {
        const RowsOf<T> dS(p.scores), g(p.block->embeddings), to(out);
        for_rows([&](int64_t i) {
          row_multiple(to[i], g[rows_.begin + i], to.width, static_cast<T>(factor * *dS[i]), add);
        });
      }
      add = true;
    }
  }

  // dL/ds = <F, dS G>, so dS G is needed before it is scaled.
  void add_to_scale() {
    const Tensor unscaled = part(product_, 0, {0, rows_.size()});
    add_to_queries(unscaled, false, 1);
    const RowsOf<T> f(tile_queries_), from(unscaled);
    std::vector<double> dots(rows_.size());
    for_rows([&](int64_t i) { dots[i] = row_dot(f[i], from[i], f.width); });
    double& total = *gradients_.scale->template mutable_data_ptr<double>();
    total = std::accumulate(dots.begin(), dots.end(), rows_.begin > 0 || columns_.begin > 0 ? total : 0.0);
    if (!gradients_.queries) return;
    const RowsOf<T> to(*gradients_.queries);
    for_rows([&](int64_t i) {
      row_multiple(to[rows_.begin + i], from[i], f.width, static_cast<T>(scale_), columns_.begin > 0);
    });
  }

  const double scale_;
  const Gradients gradients_;
  Tensor queries_;
  std::vector<Block> blocks_;
  int64_t width_ = 0;

  Tensor workspace_, product_, ones_;
  Range rows_{}, columns_{};  // of the tile at hand
  Tensor tile_queries_, scores_;
  std::vector<Part> parts_;
};

}  // namespace fastqt
