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
struct Block {
  Tensor embeddings;
  std::optional<Tensor> gradient;
  Range columns;
  bool is_row_negatives;
};

template <class T>
class Walk {
 public:
  Walk(const Embeddings& given, double scale, const Gradients& gradients)
      : scale_(scale), gradients_(gradients), queries_(with_blas_layout(given.queries)) {
    const auto add = [&](const Tensor& embeddings, const std::optional<Tensor>& gradient, int64_t columns) {
      blocks_.push_back({embeddings, gradient, {width_, width_ + columns}, false});
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
  }

  // Calls visit() for each tile of at most rows x columns, none of which has columns of two blocks. visit() reads
  // the scores from tile(), and may write their gradient there.
  template <class F>
  void for_tiles(int64_t rows, int64_t columns, const F& visit) {
    allocate_workspace(rows, columns);
    for_ranges(queries_.size(0), rows, [&](Range row_range) {
      enter_rows(row_range);
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

  // The same with tiles of whole rows, which have the columns of all blocks.
  template <class F>
  void for_chunks(int64_t rows, const F& visit) {
    allocate_workspace(rows, width_);
    for_ranges(queries_.size(0), rows, [&](Range range) {
      enter_rows(range);
      columns_ = {0, width_};
      scores_ = part(workspace_, 0, {0, range.size()});
      parts_.clear();
      for (const Block& block : blocks_)
        parts_.push_back({&block, {0, block.columns.size()}, part(scores_, 1, block.columns)});
      score();
      visit();
    });
  }

  // The tile that is visited.
  Tile<T> tile() const {
    return {scores_.template mutable_data_ptr<T>(), scores_.stride(0), rows_.begin, rows_.size(), columns_.begin,
            columns_.size()};
  }

  // Adds this tile's share to all gradients. The tile now holds dS, the gradient of its scores.
  void differentiate() {
    for (const Part& p : parts_)
      if (p.block->gradient) add_to_columns(p);
    if (gradients_.bias && columns_.begin < blocks_.front().columns.end) add_to_bias(parts_.front());
    if (gradients_.scale) {
      add_to_scale();
    } else if (gradients_.queries) {
      add_to_queries(part(*gradients_.queries, 0, rows_), columns_.begin > 0, scale_);
    }
  }

 private:
  // The columns that the tile has of one block, counted from the first of the block, and their scores.
  struct Part {
    const Block* block;
    Range columns;
    Tensor scores;
  };

  void allocate_workspace(int64_t rows, int64_t columns) {
    workspace_ = new_matrix(queries_, std::min(rows, queries_.size(0)), std::min(columns, width_));
    if (gradients_.bias) {
      ones_ = new_matrix(queries_, 1, workspace_.size(0));
      torch::stable::fill_(ones_, 1);
    }
    if (gradients_.scale) unscaled_queries_ = new_matrix(queries_, workspace_.size(0), queries_.size(1));
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
      for_rows([&](int64_t i) { *scores[i] = static_cast<T>(scale_ * row_dot(f[i], g[rows_.begin + i], f.width)); });
    }
  }

  void add_to_columns(const Part& p) const {
    if (!p.block->is_row_negatives) {
      const Tensor gradient = part(*p.block->gradient, 0, p.columns);
      return multiply(gradient, transposed(p.scores), tile_queries_, rows_.begin > 0, scale_);
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
    multiply(gradient, part(ones_, 1, {0, rows_.size()}), candidates.scores, rows_.begin > 0, 1);
  }

  // Adds factor * dS G to `out`, or writes it there where `add` is false.
  void add_to_queries(const Tensor& out, bool add, double factor) const {
    for (const Part& p : parts_) {
      if (!p.block->is_row_negatives) {
        multiply(out, p.scores, part(p.block->embeddings, 0, p.columns), add, factor);
      } else {
        const RowsOf<T> dS(p.scores), g(p.block->embeddings), to(out);
        for_rows([&](int64_t i) {
          row_multiple(to[i], g[rows_.begin + i], to.width, static_cast<T>(factor * *dS[i]), add);
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

  Tensor workspace_, unscaled_queries_, ones_;
  Range rows_{}, columns_{};  // of the tile that is visited
  Tensor tile_queries_, scores_;
  std::vector<Part> parts_;
};

}  // namespace fastqt
