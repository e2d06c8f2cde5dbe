// CLIP's loss on a CPU: a softmax over each row of the score matrix and one over each column.
//
// The first walk over tiles finds the logsumexp of rows and columns together. The second one turns
// the scores into their gradient, the sum of both directions. It computes the scores once more of
// those tiles that the memory could not keep: 6 N^2 D operations where all tiles are kept, and 8
// N^2 D where none is.
//
// Of a batch that several processes share, each has rectangles of the scores. The two walks over
// one of these are operators of their own, because the sums of all rectangles are added up between
// them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/checks.h"
#include "cpu/clip_tile.h"
#include "cpu/log_sums.h"
#include "cpu/walk.h"

namespace fastqt {
namespace {

// The softmaxes of rows and of columns, and the gradients of the pairs: what the gradient of a
// score depends on.
struct Sides {
  const double *row_logsumexp, *row_weights;        // (multiples, rows)
  const double *column_logsumexp, *column_weights;  // (multiples, columns)
  PairGradients pairs;
  std::vector<double> multiples{1.0};
};

// Those of sum_i weights_i loss_i, where all pairs are on the diagonal and their sums are known.
class WholeBatch {
 public:
  WholeBatch(const PairSums& sums, const double* weights)
      : halves_(sums.pairs), row_logsumexp_(sums.pairs), column_logsumexp_(sums.pairs),
        pairs_(sums.pairs) {
    for (int64_t i = 0; i < sums.pairs; ++i) {
      halves_[i] = weights[i] / 2;
      row_logsumexp_[i] = log_add(sums.row_others[i], sums.positive[i]);
      column_logsumexp_[i] = log_add(sums.column_others[i], sums.positive[i]);
      pairs_[i] = -halves_[i] * std::exp(sums.row_others[i] - row_logsumexp_[i]) -
                  halves_[i] * std::exp(sums.column_others[i] - column_logsumexp_[i]);
    }
  }

  Sides sides() const {
    const auto n = static_cast<int64_t>(pairs_.size());
    return {row_logsumexp_.data(),
            halves_.data(),
            column_logsumexp_.data(),
            halves_.data(),
            {pairs_.data(), n}};
  }

 private:
  std::vector<double> halves_, row_logsumexp_, column_logsumexp_, pairs_;
};

template <class S>
class Clip {
  using T = Computed<S>;

 public:
  Clip(Walk<S>& walk, int64_t rows, int64_t columns)
      : walk_(walk), rows_(rows), columns_(columns) {}

  // Finds the score of each pair and the sums of rows and columns, and keeps the scores of `kept`
  // tiles.
  void find_sums(const PairSums& sums, int64_t tile_rows, int64_t tile_columns, int64_t kept) {
    const auto multiples = static_cast<int64_t>(sums.multiples.size());
    std::fill_n(sums.row_others, multiples * rows_, -kInfinity);
    std::fill_n(sums.column_others, multiples * columns_, -kInfinity);
    walk_.for_tiles(tile_rows, tile_columns, [&] { clip_tile(walk_.tile(), sums); }, kept);
  }

  // Finds the gradients on tiles that `find_sums` has visited.
  void find_gradients(const Sides& sides) {
    const std::vector<Softmaxes<T>> softmaxes = softmaxes_of(sides);
    walk_.for_tiles_again([&](bool kept) { differentiate(softmaxes, sides.pairs, kept); });
    walk_.finish();
  }

  // The same on tiles that nothing has visited.
  void find_gradients(const Sides& sides, int64_t tile_rows, int64_t tile_columns) {
    const std::vector<Softmaxes<T>> softmaxes = softmaxes_of(sides);
    walk_.for_tiles(tile_rows, tile_columns, [&] { differentiate(softmaxes, sides.pairs, false); });
    walk_.finish();
  }

 private:
  void differentiate(const std::vector<Softmaxes<T>>& softmaxes, const PairGradients& pairs,
                     bool visited) {
    clip_tile_backward(walk_.tile(), softmaxes, pairs, visited);
    walk_.differentiate();
  }

  std::vector<Softmaxes<T>> softmaxes_of(const Sides& sides) const {
    std::vector<Softmaxes<T>> made;
    int64_t k = 0;
    for (const double multiple : sides.multiples) {
      const int64_t row = k * rows_, column = k * columns_;
      made.push_back(
          {static_cast<T>(multiple),
           {sides.row_logsumexp + row, sides.row_weights + row, rows_, multiple},
           {sides.column_logsumexp + column, sides.column_weights + column, columns_, multiple}});
      ++k;
    }
    return made;
  }

  Walk<S>& walk_;
  const int64_t rows_, columns_;
};

// The checks fail where a tensor does not have the dtype, shape or layout that an operator reads or
// writes.

void check_scores(const Tensor& queries, const Tensor& candidates, int64_t tile_rows,
                  int64_t tile_columns) {
  check_queries(queries, true);
  check_tensor("candidates", candidates, queries.scalar_type(), {kAnySize, queries.size(1)},
               Layout::kStrided);
  check_tile(tile_rows, tile_columns);
}

void check_gradients(const Tensor& queries, const Tensor& candidates,
                     const std::optional<Tensor>& dqueries,
                     const std::optional<Tensor>& dcandidates,
                     const std::optional<Tensor>& dscale) {
  const ScalarType dtype = queries.scalar_type();
  const int64_t D = queries.size(1);
  check_tensor("dqueries", dqueries, dtype, {queries.size(0), D}, Layout::kContiguous);
  check_tensor("dcandidates", dcandidates, dtype, {candidates.size(0), D}, Layout::kContiguous);
  check_tensor("dscale", dscale, ScalarType::Double, {}, Layout::kContiguous);
}

// Of each row, or each column, one number.
void check_numbers(const char* name, const Tensor& numbers, int64_t size) {
  check_tensor(name, numbers, ScalarType::Double, {size}, Layout::kContiguous);
}

// The same of each multiple of the scores.
void check_numbers(const char* name, const Tensor& numbers, const std::vector<double>& multiples,
                   int64_t size) {
  STD_TORCH_CHECK(!multiples.empty(), "multiples: want at least 1, got none");
  const auto count = static_cast<int64_t>(multiples.size());
  check_tensor(name, numbers, ScalarType::Double, {count, size}, Layout::kContiguous);
}

// Of each pair one number. There are at most as many pairs as rows and as columns.
void check_pairs(const char* name, const Tensor& numbers, const Tensor& queries,
                 const Tensor& candidates) {
  const int64_t most = std::min(queries.size(0), candidates.size(0));
  STD_TORCH_CHECK(numbers.dim() == 1 && numbers.size(0) <= most, name,
                  ": want a vector of at most ", most, " pairs, got ", described(numbers));
  check_numbers(name, numbers, numbers.size(0));
}

void check_walk(const Tensor& queries, const Tensor& candidates, const Tensor& sums,
                const Tensor& loss, const std::optional<Tensor>& weights,
                const std::optional<Tensor>& dqueries, const std::optional<Tensor>& dcandidates,
                const std::optional<Tensor>& dscale) {
  const int64_t N = queries.size(0);
  check_tensor("candidates", candidates, queries.scalar_type(), {N, queries.size(1)},
               Layout::kStrided);
  check_tensor("sums", sums, ScalarType::Double, {3, N}, Layout::kContiguous);
  check_numbers("loss", loss, N);
  if (weights) check_numbers("weights", *weights, N);
  check_gradients(queries, candidates, dqueries, dcandidates, dscale);
  STD_TORCH_CHECK(weights || !(dqueries || dcandidates || dscale),
                  "weights: want them with gradients, got None");
}

// Writes the loss of each pair, half that of its row and half that of its column. It is computed
// from `sums`, (3, N) as in PairSums, which are read if `known` and else found. The scores of at
// most `kept_tiles` tiles are held at a time. With weights, writes the gradients of sum_i weights_i
// loss_i to those of dqueries, dcandidates and dscale that are given.
void clip_walk_(const Tensor queries, const Tensor candidates, double scale, bool normalize,
                int64_t tile_rows, int64_t tile_columns, int64_t kept_tiles, bool known,
                const Tensor sums, const Tensor loss, const std::optional<Tensor> weights,
                const std::optional<Tensor> dqueries, const std::optional<Tensor> dcandidates,
                const std::optional<Tensor> dscale) {
  check_scores(queries, candidates, tile_rows, tile_columns);
  check_walk(queries, candidates, sums, loss, weights, dqueries, dcandidates, dscale);
  STD_TORCH_CHECK(kept_tiles >= 1, "kept_tiles: want at least 1, got ", kept_tiles);

  const std::optional<Tensor> none;
  const int64_t n = queries.size(0);
  double* const first = sums.mutable_data_ptr<double>();
  const PairSums pairs{first, first + n, first + 2 * n, n, n, n};
  const double* const w = weights ? weights->const_data_ptr<double>() : nullptr;

  with_dtype(queries.scalar_type(), [&]<class S>(S) {
    Walk<S> walk({queries, candidates, none, none}, scale,
                 {dqueries, dcandidates, none, none, dscale, none}, normalize);
    Clip<S> clip(walk, n, n);
    if (!known) clip.find_sums(pairs, tile_rows, tile_columns, w ? kept_tiles : 1);
    if (w && known) clip.find_gradients(WholeBatch(pairs, w).sides(), tile_rows, tile_columns);
    if (w && !known) clip.find_gradients(WholeBatch(pairs, w).sides());
  });

  double* const losses = loss.mutable_data_ptr<double>();
  for (int64_t i = 0; i < n; ++i)
    losses[i] = (softplus(pairs.row_others[i] - pairs.positive[i]) +
                 softplus(pairs.column_others[i] - pairs.positive[i])) /
                2;
}

// Finds the sums of a rectangle of scores, of which row i and column i are a pair for i <
// len(positive): the score of each pair, and of each multiple of the scores the logsumexp of the
// other cells in each row and in each column, (multiples, n) and (multiples, m). With `scores`,
// writes those of the first rows there, which `clip_gradients_` would compute once more.
void clip_sums_(const Tensor queries, const Tensor candidates, double scale, bool normalize,
                int64_t tile_rows, int64_t tile_columns, const Tensor positive,
                const Tensor row_others, const Tensor column_others,
                const std::optional<Tensor> scores, const std::vector<double> multiples) {
  check_scores(queries, candidates, tile_rows, tile_columns);
  const int64_t n = queries.size(0), m = candidates.size(0);
  check_kept_scores(scores, queries.scalar_type(), n, m);
  check_pairs("positive", positive, queries, candidates);
  check_numbers("row_others", row_others, multiples, n);
  check_numbers("column_others", column_others, multiples, m);
  const std::optional<Tensor> none;
  const PairSums sums{positive.mutable_data_ptr<double>(),
                      row_others.mutable_data_ptr<double>(),
                      column_others.mutable_data_ptr<double>(),
                      positive.size(0),
                      n,
                      m,
                      multiples};
  with_dtype(queries.scalar_type(), [&]<class S>(S) {
    Walk<S> walk({queries, candidates, none, none}, scale, {}, normalize);
    if (scores) walk.keep(*scores);
    Clip<S>(walk, n, m).find_sums(sums, tile_rows, tile_columns, 1);
  });
}

// Writes those gradients of a rectangle that are given. That of a score is `pairs` at a pair, and
// elsewhere the sum over its multiples k of k (row_weights_i exp(k s_ij - row_logsumexp_i) +
// column_weights_j exp(k s_ij - column_logsumexp_j)). Scores that `clip_sums_` has kept are read.
void clip_gradients_(const Tensor queries, const Tensor candidates, double scale, bool normalize,
                     int64_t tile_rows, int64_t tile_columns, const Tensor row_logsumexp,
                     const Tensor row_weights, const Tensor column_logsumexp,
                     const Tensor column_weights, const Tensor pairs,
                     const std::optional<Tensor> scores, const std::vector<double> multiples,
                     const std::optional<Tensor> dqueries, const std::optional<Tensor> dcandidates,
                     const std::optional<Tensor> dscale) {
  check_scores(queries, candidates, tile_rows, tile_columns);
  const int64_t n = queries.size(0), m = candidates.size(0);
  check_numbers("row_logsumexp", row_logsumexp, multiples, n);
  check_numbers("row_weights", row_weights, multiples, n);
  check_numbers("column_logsumexp", column_logsumexp, multiples, m);
  check_numbers("column_weights", column_weights, multiples, m);
  check_pairs("pairs", pairs, queries, candidates);
  check_kept_scores(scores, queries.scalar_type(), n, m);
  check_gradients(queries, candidates, dqueries, dcandidates, dscale);
  const std::optional<Tensor> none;
  const Sides sides{
      row_logsumexp.const_data_ptr<double>(),          row_weights.const_data_ptr<double>(),
      column_logsumexp.const_data_ptr<double>(),       column_weights.const_data_ptr<double>(),
      {pairs.const_data_ptr<double>(), pairs.size(0)}, multiples};
  with_dtype(queries.scalar_type(), [&]<class S>(S) {
    Walk<S> walk({queries, candidates, none, none}, scale,
                 {dqueries, dcandidates, none, none, dscale, none}, normalize);
    if (scores) walk.reuse(*scores);
    Clip<S>(walk, n, m).find_gradients(sides, tile_rows, tile_columns);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "clip_walk_(Tensor queries, Tensor candidates, float scale, bool normalize, int tile_rows, "
      "int tile_columns, "
      "int kept_tiles, bool known, Tensor(a!) sums, Tensor(b!) loss, Tensor? weights, Tensor(c!)? "
      "dqueries, "
      "Tensor(d!)? dcandidates, Tensor(e!)? dscale) -> ()");
  m.def(
      "clip_sums_(Tensor queries, Tensor candidates, float scale, bool normalize, int tile_rows, "
      "int tile_columns, "
      "Tensor(a!) positive, Tensor(b!) row_others, Tensor(c!) column_others, Tensor(d!)? scores, "
      "float[] multiples) -> ()");
  m.def(
      "clip_gradients_(Tensor queries, Tensor candidates, float scale, bool normalize, int "
      "tile_rows, "
      "int tile_columns, Tensor row_logsumexp, Tensor row_weights, Tensor column_logsumexp, Tensor "
      "column_weights, "
      "Tensor pairs, Tensor? scores, float[] multiples, Tensor(a!)? dqueries, "
      "Tensor(b!)? dcandidates, Tensor(c!)? dscale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("clip_walk_", TORCH_BOX(&clip_walk_));
  m.impl("clip_sums_", TORCH_BOX(&clip_sums_));
  m.impl("clip_gradients_", TORCH_BOX(&clip_gradients_));
}

}  // namespace fastqt
