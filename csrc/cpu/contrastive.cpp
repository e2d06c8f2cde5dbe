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
#include <vector>

#include "cpu/matrix.h"
#include "cpu/row_passes.h"
#include "cpu/score_tile.h"

namespace fastqt {
namespace {

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
  Walk(const Embeddings& given, double scale, const Gradients& gradients, const Cells<T>& cells)
      : scale_(scale), gradients_(gradients), cells_(cells), queries_(for_blas(given.queries)) {
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

  // Each row's log-sum-exp, mass and loss.
  void softmax(int64_t rows, int64_t columns, const RowSums& sums) {
    const int64_t n = queries_.size(0);
    std::fill_n(sums.logsumexp, n, -std::numeric_limits<double>::infinity());
    std::fill_n(sums.mass, n, 0.0);
    std::fill_n(sums.loss, n, 0.0);
    for_tiles(rows, columns, [&] { softmax_tile(cells_, tile(), sums, report); });
    finish(sums);
  }

  // The same, and the gradients of sum_i row_weights_i loss_i.
  void softmax_with_gradients(int64_t rows, const double* row_weights, const RowSums& sums) {
    scores_of(rows, width_);
    for_ranges(queries_.size(0), rows, [&](Range range) {
      enter(range);
      columns_ = {0, width_};
      scores_ = part(workspace_, 0, {0, range.size()});
      parts_.clear();
      for (const Block& block : blocks_)
        parts_.push_back({&block, {0, block.columns.size()}, part(scores_, 1, block.columns)});
      score();
      softmax_rows(cells_, tile(), row_weights, sums, report);
      differentiate();
    });
    finish(sums);
  }

  // The gradients of sum_i row_weights_i loss_i, from log-sum-exp and mass.
  void softmax_gradients(int64_t rows, int64_t columns, const double* row_weights, const RowSums& sums) {
    for_tiles(rows, columns, [&] {
      softmax_tile_backward(cells_, tile(), row_weights, sums.logsumexp, sums.mass, report);
      differentiate();
    });
  }

  // Each row's loss.
  void sigmoid(int64_t rows, int64_t columns, double* loss) {
    std::fill_n(loss, queries_.size(0), 0.0);
    for_tiles(rows, columns, [&] { sigmoid_tile(cells_, tile(), loss, report); });
  }

  // The same, and the gradients of sum_i row_weights_i loss_i.
  void sigmoid_with_gradients(int64_t rows, int64_t columns, const double* row_weights, double* loss) {
    std::fill_n(loss, queries_.size(0), 0.0);
    for_tiles(rows, columns, [&] {
      sigmoid_tile_backward(cells_, tile(), row_weights, loss, report);
      differentiate();
    });
  }

  Report report;

 private:
  // A block's columns that the tile has, counted from the block's first, and their scores.
  struct Part {
    const Block* block;
    Range columns;
    Tensor scores;
  };

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

  Tile<T> tile() const {
    return {scores_.template mutable_data_ptr<T>(), scores_.stride(0), rows_.begin, rows_.size(), columns_.begin,
            columns_.size()};
  }

  template <class F>
  void for_rows(const F& visit) const {
    constexpr int64_t kElementsPerTask = 16384;
    const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, queries_.size(1)));
    torch::stable::parallel_for(0, rows_.size(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) visit(i);
    });
  }

  void score() const {
    for (const Part& p : parts_) {
      if (!p.block->is_private) {
        multiply(p.scores, tile_queries_, transposed(part(p.block->embeddings, 0, p.columns)), 0, scale_);
        continue;
      }
      const RowsOf<T> f(tile_queries_), g(p.block->embeddings), scores(p.scores);
      for_rows([&](int64_t i) { *scores[i] = static_cast<T>(scale_ * row_dot(f[i], g[rows_.begin + i], f.width)); });
    }
  }

  // Adds what the tile, which now holds dS, gives to the gradients.
  void differentiate() {
    for (const Part& p : parts_)
      if (p.block->gradient) add_to_own(p);
    if (gradients_.bias && columns_.begin < cells_.candidates) add_to_bias(parts_.front());
    if (gradients_.scale) {
      add_to_scale();
    } else if (gradients_.queries) {
      add_to_queries(part(*gradients_.queries, 0, rows_), columns_.begin > 0, scale_);
    }
  }

  void add_to_own(const Part& p) const {
    if (!p.block->is_private) {
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

  // Adds factor * dS G to `out`, or sets it to that.
  void add_to_queries(const Tensor& out, bool add, double factor) const {
    for (const Part& p : parts_) {
      if (!p.block->is_private) {
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

  void finish(const RowSums& sums) const {
    for (int64_t i = 0; i < queries_.size(0); ++i)
      sums.loss[i] = sums.mass[i] > 0 ? sums.mass[i] * sums.logsumexp[i] + sums.loss[i] : 0;
  }

  const double scale_;
  const Gradients& gradients_;
  const Cells<T>& cells_;
  Tensor queries_;
  std::vector<Block> blocks_;
  int64_t width_ = 0;

  Tensor workspace_, product_, ones_;
  Range rows_{}, columns_{};  // of the tile at hand
  Tensor tile_queries_, scores_;
  std::vector<Part> parts_;
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

// Each row's loss. With `weight`, the gradients of total = weight * sum_i loss_i that are given a
// place, which for a softmax takes whole rows (no tile_columns); with row_weights those of
// sum_i row_weights_i loss_i, for a softmax from log-sum-exp and mass, which are found otherwise.
// Returns status, row and column of the first offending target.
std::tuple<int64_t, int64_t, int64_t> contrastive_walk_(
    const Tensor queries, const Tensor candidates, const std::optional<Tensor> negatives,
    const std::optional<Tensor> row_negatives, const std::optional<Tensor> bias, double scale, int64_t link,
    int64_t diagonal, const std::optional<Tensor> row_starts, const std::optional<Tensor> columns,
    const std::optional<Tensor> weights, const std::optional<Tensor> dense, const std::optional<Tensor> background,
    const std::optional<Tensor> query_groups, const std::optional<Tensor> candidate_groups,
    const std::optional<Tensor> mask, int64_t tile_rows, const std::optional<int64_t> tile_columns,
    const std::optional<double> weight, const std::optional<Tensor> row_weights,
    const std::optional<Tensor> logsumexp, const std::optional<Tensor> mass, const std::optional<Tensor> loss,
    const std::optional<Tensor> total, const std::optional<Tensor> dqueries, const std::optional<Tensor> dcandidates,
    const std::optional<Tensor> dnegatives, const std::optional<Tensor> drow_negatives,
    const std::optional<Tensor> dbias, const std::optional<Tensor> dscale) {
  const Embeddings embeddings{queries, candidates, negatives, row_negatives};
  const Gradients gradients{dqueries, dcandidates, dnegatives, drow_negatives, dbias, dscale};
  const int64_t n = queries.size(0);
  std::vector<double> unwanted;
  unwanted.reserve(4 * n);  // for all that follow, so that none moves
  const auto place = [&](const std::optional<Tensor>& given, double value) {
    if (given) return given->mutable_data_ptr<double>();
    unwanted.resize(unwanted.size() + n, value);
    return unwanted.data() + unwanted.size() - n;
  };
  const RowSums sums{place(logsumexp, 0), place(mass, 0), place(loss, 0)};
  const double* const w = weight ? place({}, *weight) : pointer<double>(row_weights);
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
    Walk<T> walk(embeddings, scale, gradients, cells);
    const int64_t width = tile_columns.value_or(std::numeric_limits<int64_t>::max());
    if (link == kSigmoid) {
      w ? walk.sigmoid_with_gradients(tile_rows, width, w, sums.loss) : walk.sigmoid(tile_rows, width, sums.loss);
    } else if (!w) {
      walk.softmax(tile_rows, width, sums);
    } else if (tile_columns) {
      walk.softmax_gradients(tile_rows, width, w, sums);
    } else {
      walk.softmax_with_gradients(tile_rows, w, sums);
    }
    return std::tuple{walk.report.status, walk.report.row, walk.report.column};
  };
  const auto report =
      queries.scalar_type() == torch::headeronly::ScalarType::Float ? run(float{}) : run(double{});
  if (total) store(*total, weight.value_or(1) * std::accumulate(sums.loss, sums.loss + n, 0.0));
  return report;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "contrastive_walk_(Tensor queries, Tensor candidates, Tensor? negatives, Tensor? row_negatives, Tensor? bias, "
      "float scale, int link, int diagonal, Tensor? row_starts, Tensor? columns, Tensor? weights, Tensor? dense, "
      "Tensor? background, Tensor? query_groups, Tensor? candidate_groups, Tensor? mask, int tile_rows, "
      "int? tile_columns, float? weight, Tensor? row_weights, Tensor(a!)? logsumexp, Tensor(b!)? mass, "
      "Tensor(c!)? loss, Tensor(d!)? total, Tensor(e!)? dqueries, Tensor(f!)? dcandidates, Tensor(g!)? dnegatives, "
      "Tensor(h!)? drow_negatives, Tensor(i!)? dbias, Tensor(j!)? dscale) -> (int, int, int)");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) { m.impl("contrastive_walk_", TORCH_BOX(&contrastive_walk_)); }

}  // namespace fastqt
