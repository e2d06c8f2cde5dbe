// CLIP's loss on a CPU: a softmax over each row of the score matrix and one over each column.
//
// The first walk over tiles finds the logsumexp of rows and columns together. The second one turns the scores into
// their gradient, the sum of both directions. It computes the scores once more of those tiles that the memory could
// not keep: 6 N^2 D operations where all tiles are kept, and 8 N^2 D where none is.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "cpu/checks.h"
#include "cpu/clip_tile.h"
#include "cpu/log_sums.h"
#include "cpu/walk.h"

namespace fastqt {
namespace {

template <class T>
class Clip {
 public:
  Clip(Walk<T>& walk, const PairSums& sums, int64_t n) : walk_(walk), sums_(sums), n_(n) {}

  // Finds the score and the sums of each pair, and keeps the scores of `kept` tiles.
  void find_sums(int64_t rows, int64_t columns, int64_t kept) {
    std::fill_n(sums_.row_others, n_, -kInfinity);
    std::fill_n(sums_.column_others, n_, -kInfinity);
    walk_.for_tiles(rows, columns, [&] { clip_tile(walk_.tile(), sums_); }, kept);
  }

  // Finds the gradients of sum_i weights_i loss_i from the sums, on tiles that `find_sums` has visited.
  void find_gradients(const double* weights) {
    const Softmax<T> of_rows = softmax(sums_.row_others, weights), of_columns = softmax(sums_.column_others, weights);
    walk_.for_tiles_again([&](bool kept) { differentiate(of_rows, of_columns, kept); });
    walk_.finish();
  }

  // The same from sums that were found before.
  void find_gradients(int64_t rows, int64_t columns, const double* weights) {
    const Softmax<T> of_rows = softmax(sums_.row_others, weights), of_columns = softmax(sums_.column_others, weights);
    walk_.for_tiles(rows, columns, [&] { differentiate(of_rows, of_columns, false); });
    walk_.finish();
  }

 private:
  void differentiate(const Softmax<T>& of_rows, const Softmax<T>& of_columns, bool visited) {
    clip_tile_backward(walk_.tile(), of_rows, of_columns, visited);
    walk_.differentiate();
  }

  Softmax<T> softmax(const double* others, const double* weights) const {
    return Softmax<T>(sums_.positive, others, weights, n_);
  }

  Walk<T>& walk_;
  const PairSums sums_;
  const int64_t n_;
};

// Fails where a tensor does not have the dtype, shape or layout that clip_walk_ reads and writes.
void check(const Tensor& queries, const Tensor& candidates, const Tensor& sums, const Tensor& loss,
           const std::optional<Tensor>& weights, const std::optional<Tensor>& dqueries,
           const std::optional<Tensor>& dcandidates, const std::optional<Tensor>& dscale) {
  check_queries(queries);
  const ScalarType dtype = queries.scalar_type();
  const int64_t N = queries.size(0), D = queries.size(1);
  check_tensor("candidates", candidates, dtype, {N, D}, Layout::kStrided);
  check_tensor("sums", sums, ScalarType::Double, {3, N}, Layout::kContiguous);
  check_tensor("loss", loss, ScalarType::Double, {N}, Layout::kContiguous);
  check_tensor("weights", weights, ScalarType::Double, {N}, Layout::kContiguous);
  check_tensor("dqueries", dqueries, dtype, {N, D}, Layout::kContiguous);
  check_tensor("dcandidates", dcandidates, dtype, {N, D}, Layout::kContiguous);
  check_tensor("dscale", dscale, ScalarType::Double, {}, Layout::kContiguous);
  STD_TORCH_CHECK(weights || !(dqueries || dcandidates || dscale), "weights: want them with gradients, got None");
}

// Writes the loss of each pair, half that of its row and half that of its column. It is computed from `sums`,
// (3, N) as in PairSums, which are read if `known` and else found. The scores of at most `kept_tiles`
// tiles are held at a time. With weights, writes the gradients of
// sum_i weights_i loss_i to those of dqueries, dcandidates and dscale that are given.
void clip_walk_(const Tensor queries, const Tensor candidates, double scale, bool normalize, int64_t tile_rows,
                int64_t tile_columns, int64_t kept_tiles, bool known, const Tensor sums, const Tensor loss,
                const std::optional<Tensor> weights, const std::optional<Tensor> dqueries,
                const std::optional<Tensor> dcandidates, const std::optional<Tensor> dscale) {
  check(queries, candidates, sums, loss, weights, dqueries, dcandidates, dscale);
  check_tile(tile_rows, tile_columns);
  STD_TORCH_CHECK(kept_tiles >= 1, "kept_tiles: want at least 1, got ", kept_tiles);
  const std::optional<Tensor> none;
  const int64_t n = queries.size(0);
  double* const first = sums.mutable_data_ptr<double>();
  const PairSums pairs{first, first + n, first + 2 * n};
  const double* const w = weights ? weights->const_data_ptr<double>() : nullptr;
  const auto run = [&]<class T>(T) {
    Walk<T> walk({queries, candidates, none, none}, scale, {dqueries, dcandidates, none, none, dscale, none},
                 normalize);
    Clip<T> clip(walk, pairs, n);
    if (!known) clip.find_sums(tile_rows, tile_columns, w ? kept_tiles : 1);
    if (w && known) clip.find_gradients(tile_rows, tile_columns, w);
    if (w && !known) clip.find_gradients(w);
  };
  queries.scalar_type() == ScalarType::Float ? run(float{}) : run(double{});
  double* const losses = loss.mutable_data_ptr<double>();
  for (int64_t i = 0; i < n; ++i)
    losses[i] = (softplus(pairs.row_others[i] - pairs.positive[i]) +
                 softplus(pairs.column_others[i] - pairs.positive[i])) / 2;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "clip_walk_(Tensor queries, Tensor candidates, float scale, bool normalize, int tile_rows, int tile_columns, "
      "int kept_tiles, bool known, Tensor(a!) sums, Tensor(b!) loss, Tensor? weights, Tensor(c!)? dqueries, "
      "Tensor(d!)? dcandidates, Tensor(e!)? dscale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) { m.impl("clip_walk_", TORCH_BOX(&clip_walk_)); }

}  // namespace fastqt
