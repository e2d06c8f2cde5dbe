// CLIP's loss on a CPU: a softmax over each row of the score matrix and one over each column.
//
// A first walk over tiles finds the log-sum-exp of rows and columns together, a second one computes the
// scores once more and has both gradients of a cell at hand: 8 N^2 D operations in all. Where one
// tile holds all scores the second walk takes them as they are: 6 N^2 D.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "cpu/clip_tile.h"
#include "cpu/log_sums.h"
#include "cpu/walk.h"

namespace fastqt {
namespace {

template <class T>
class Clip {
 public:
  Clip(Walk<T>& walk, const PairSums& sums, int64_t n) : walk_(walk), sums_(sums), n_(n) {}

  // What is known of each pair.
  void sums(int64_t rows, int64_t columns) {
    clear();
    walk_.for_tiles(rows, columns, [&] { clip_tile(walk_.tile(), sums_); });
  }

  // The gradients of sum_i weights_i loss_i from there.
  void gradients(int64_t rows, int64_t columns, const double* weights) {
    const Softmax<T> of_rows = softmax(sums_.row_others, weights), of_columns = softmax(sums_.column_others, weights);
    walk_.for_tiles(rows, columns, [&] {
      clip_tile_backward(walk_.tile(), of_rows, of_columns);
      walk_.differentiate();
    });
  }

  // Both, on all scores at once.
  void sums_and_gradients(const double* weights) {
    clear();
    walk_.for_tiles(n_, n_, [&] {
      clip_tile(walk_.tile(), sums_);
      clip_tile_backward(walk_.tile(), softmax(sums_.row_others, weights), softmax(sums_.column_others, weights));
      walk_.differentiate();
    });
  }

 private:
  void clear() const {
    std::fill_n(sums_.row_others, n_, -kInfinity);
    std::fill_n(sums_.column_others, n_, -kInfinity);
  }

  Softmax<T> softmax(const double* others, const double* weights) const {
    return Softmax<T>(sums_.positive, others, weights, n_);
  }

  Walk<T>& walk_;
  const PairSums sums_;
  const int64_t n_;
};

// Each pair's loss, half its row's and half its column's, by way of `sums`, (3, N) as of PairSums, which are
// found unless they are known. With weights, the gradients of sum_i weights_i loss_i that are given a place.
void clip_walk_(const Tensor queries, const Tensor candidates, double scale, int64_t tile_rows, int64_t tile_columns,
                bool known, const Tensor sums, const Tensor loss, const std::optional<Tensor> weights,
                const std::optional<Tensor> dqueries, const std::optional<Tensor> dcandidates,
                const std::optional<Tensor> dscale) {
  const std::optional<Tensor> none;
  const int64_t n = queries.size(0);
  double* const first = sums.mutable_data_ptr<double>();
  const PairSums pairs{first, first + n, first + 2 * n};
  const double* const w = weights ? weights->const_data_ptr<double>() : nullptr;
  const auto run = [&]<class T>(T) {
    Walk<T> walk({queries, candidates, none, none}, scale, {dqueries, dcandidates, none, none, none, dscale});
    Clip<T> clip(walk, pairs, n);
    if (w && !known && tile_rows >= n && tile_columns >= n) return clip.sums_and_gradients(w);
    if (!known) clip.sums(tile_rows, tile_columns);
    if (w) clip.gradients(tile_rows, tile_columns, w);
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
