// CLIP's loss on a CPU: a softmax over each row of the score matrix and one over each column.
//
// A first walk over tiles finds the log-sum-exp of rows and columns together, a second one computes the
// scores once more and has both gradients of a cell at hand: 8 N^2 D operations in all. Where one
// tile holds all scores the second walk takes them as they are: 6 N^2 D.
//
// The diagonal holds the pairs. Its cells are kept out of the sums and computed in double: with o the
// log-sum-exp of the others, a row's loss is log(1 + exp(o - s_ii)), which loses nothing once it is learnt.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "cpu/log_sums.h"
#include "cpu/row_passes.h"
#include "cpu/walk.h"

namespace fastqt {
namespace {

// Of each pair, N values each: its score, and the log-sum-exp of the others in its row and in its column.
struct PairSums {
  double* positive;
  double* row_others;
  double* column_others;
};

template <class F>
void parallel(int64_t size, int64_t cells_each, const F& visit) {
  constexpr int64_t kCellsPerTask = 16384;
  torch::stable::parallel_for(0, size, std::max<int64_t>(1, kCellsPerTask / std::max<int64_t>(1, cells_each)), visit);
}

template <class T>
void add_rows(const Tile<T>& tile, const PairSums& sums) {
  parallel(tile.rows, tile.columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* const scores = tile.scores + i * tile.row_stride;
      const int64_t row = tile.first_row + i, diagonal = row - tile.first_column;
      if (diagonal >= 0 && diagonal < tile.columns) {
        sums.positive[row] = scores[diagonal];
        scores[diagonal] = -std::numeric_limits<T>::infinity();
      }
      const T largest = row_max(scores, tile.columns);
      if (largest == -std::numeric_limits<T>::infinity()) continue;
      const double total = row_exp_sum(scores, tile.columns, largest);
      sums.row_others[row] = log_add(sums.row_others[row], largest + std::log(total));
    }
  });
}

// The same for columns, from a tile that `add_rows` has seen.
template <class T>
void add_columns(const Tile<T>& tile, const PairSums& sums) {
  constexpr int64_t kStripe = 256;  // of columns
  constexpr int64_t kBlock = 64;    // fp32 partial sums go to double after so many rows
  const int64_t stripes = (tile.columns + kStripe - 1) / kStripe;
  parallel(stripes, kStripe * tile.rows, [&](int64_t begin, int64_t end) {
    T largest[kStripe], part[kStripe];
    double total[kStripe];
    for (int64_t first = begin * kStripe; first < std::min(end * kStripe, tile.columns); first += kStripe) {
      const int64_t width = std::min(kStripe, tile.columns - first);
      const T* const scores = tile.scores + first;
      std::fill_n(largest, width, std::numeric_limits<T>::lowest());  // not -inf, from which nothing can be taken
      for (int64_t i = 0; i < tile.rows; ++i) row_raise(largest, scores + i * tile.row_stride, width);
      std::fill_n(total, width, 0.0);
      for_ranges(tile.rows, kBlock, [&](Range rows) {
        std::fill_n(part, width, T(0));
        for (int64_t i = rows.begin; i < rows.end; ++i) row_exp_add(part, scores + i * tile.row_stride, largest, width);
        for (int64_t j = 0; j < width; ++j) total[j] += part[j];
      });
      for (int64_t j = 0; j < width; ++j) {
        double& others = sums.column_others[tile.first_column + first + j];
        others = log_add(others, largest[j] + std::log(total[j]));
      }
    }
  });
}

// What a softmax's cells are made of: exp(score - reference) * factor.
template <class T>
struct Softmax {
  Softmax(const double* positive, const double* others, const double* weights, int64_t n)
      : references(n), factors(n), diagonal(n) {
    for (int64_t i = 0; i < n; ++i) {
      const double logsumexp = log_add(others[i], positive[i]);
      references[i] = static_cast<T>(logsumexp);
      factors[i] = static_cast<T>(weights[i] / 2 * std::exp(references[i] - logsumexp));
      diagonal[i] = -weights[i] / 2 * std::exp(others[i] - logsumexp);
    }
  }

  std::vector<T> references, factors;
  std::vector<double> diagonal;  // the gradient at the pair's score
};

template <class T>
void differentiate(const Tile<T>& tile, const Softmax<T>& rows, const Softmax<T>& columns) {
  parallel(tile.rows, tile.columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* const scores = tile.scores + i * tile.row_stride;
      const int64_t row = tile.first_row + i, diagonal = row - tile.first_column;
      row_two_exps(scores, tile.columns, rows.references[row], rows.factors[row],
                   columns.references.data() + tile.first_column, columns.factors.data() + tile.first_column);
      if (diagonal >= 0 && diagonal < tile.columns)
        scores[diagonal] = static_cast<T>(rows.diagonal[row] + columns.diagonal[row]);
    }
  });
}

// Each pair's loss, half its row's and half its column's, by way of `sums`, (3, N) as of PairSums; they are
// found unless they are known. With weights, the gradients of sum_i weights_i loss_i.
void clip_walk_(const Tensor queries, const Tensor candidates, double scale, int64_t tile_rows, int64_t tile_columns,
                bool known, const Tensor sums, const Tensor loss, const std::optional<Tensor> weights,
                const std::optional<Tensor> dqueries, const std::optional<Tensor> dcandidates,
                const std::optional<Tensor> dscale) {
  const std::optional<Tensor> none;
  const int64_t n = queries.size(0);
  double* const first = sums.mutable_data_ptr<double>();
  const PairSums pairs{first, first + n, first + 2 * n};
  const auto run = [&]<class T>(T) {
    const Embeddings embeddings{queries, candidates, none, none};
    const Gradients gradients{dqueries, dcandidates, none, none, none, dscale};
    Walk<T> walk(embeddings, scale, gradients);
    const auto add = [&] {
      add_rows(walk.tile(), pairs);
      add_columns(walk.tile(), pairs);
    };
    const auto differentiate_tiles = [&](const auto& for_tiles) {
      const double* const w = weights->const_data_ptr<double>();
      const Softmax<T> rows(pairs.positive, pairs.row_others, w, n), columns(pairs.positive, pairs.column_others, w, n);
      for_tiles([&] {
        differentiate(walk.tile(), rows, columns);
        walk.differentiate();
      });
    };
    if (!known) std::fill_n(pairs.row_others, 2 * n, -kInfinity);
    if (weights && !known && tile_rows >= n && tile_columns >= n) {
      walk.for_tiles(n, n, [&] {
        add();
        differentiate_tiles([](const auto& visit) { visit(); });
      });
      return;
    }
    if (!known) walk.for_tiles(tile_rows, tile_columns, add);
    if (weights)
      differentiate_tiles([&](const auto& visit) { walk.for_tiles(tile_rows, tile_columns, visit); });
  };
  queries.scalar_type() == torch::headeronly::ScalarType::Float ? run(float{}) : run(double{});
  double* const losses = loss.mutable_data_ptr<double>();
  for (int64_t i = 0; i < n; ++i)
    losses[i] = (softplus(pairs.row_others[i] - pairs.positive[i]) +
                 softplus(pairs.column_others[i] - pairs.positive[i])) / 2;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "clip_walk_(Tensor queries, Tensor candidates, float scale, int tile_rows, int tile_columns, bool known, "
      "Tensor(a!) sums, Tensor(b!) loss, Tensor? weights, Tensor(c!)? dqueries, Tensor(d!)? dcandidates, "
      "Tensor(e!)? dscale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) { m.impl("clip_walk_", TORCH_BOX(&clip_walk_)); }

}  // namespace fastqt
