// MixCSE's loss on a CPU, with its three blocks of scores: one walk over chunks of whole rows.
//
// All blocks come from the same cosines, and their gradients fold back onto these: 6 N^2 D
// operations in all.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "cpu/checks.h"
#include "cpu/matrix.h"
#include "cpu/own_products.h"
#include "cpu/three_block_tile.h"

namespace fastqt {
namespace {

// The cosines of a chunk of rows, of the row above it and of the row below it, modulo N.
template <class T>
class Cosines {
 public:
  Cosines(const Tensor& queries, const Tensor& candidates, int64_t rows)
      : queries_(queries), candidates_(candidates), n_(queries.size(0)),
        lines_(new_matrix(queries, rows + 2, (n_ / kLine + 1) * kLine)), rows_(lines_),
        top_(n_ + 1) {}

  // Takes the next chunk; the first one begins at row 0. The rows that two chunks share are not
  // computed twice.
  Lines<T> find(Range chunk) {
    const int64_t size = chunk.size();
    if (chunk.begin > 0) {
      std::copy_n(rows_[last_], n_ + 1, rows_[0]);
      std::copy_n(rows_[last_ + 1], n_ + 1, rows_[1]);
      compute({chunk.begin + 1, std::min(chunk.end + 1, n_)}, 2);
    } else {
      compute({0, std::min(chunk.end + 1, n_)}, 1);
      if (chunk.end == n_) std::copy_n(rows_[n_], n_ + 1, rows_[0]);
      else compute({n_ - 1, n_}, 0);
      std::copy_n(rows_[1], n_ + 1, top_.data());
    }
    if (chunk.end == n_) std::copy_n(top_.data(), n_ + 1, rows_[size + 1]);
    last_ = size;
    return {rows_.data, rows_.stride};
  }

 private:
  static constexpr int64_t kLine = 16;

  void compute(Range rows, int64_t at) const {
    if (rows.size() == 0) return;
    const Tensor lines = part(part(lines_, 0, {at, at + rows.size()}), 1, {0, n_});
    multiply(lines, part(queries_, 0, rows), transposed(candidates_), 0, 1);
    for (int64_t i = at; i < at + rows.size(); ++i) rows_[i][n_] = rows_[i][0];
  }

  const Tensor queries_, candidates_;
  const int64_t n_;
  const Tensor lines_;
  const RowsOf<T> rows_;
  std::vector<T> top_;  // row 0, which is below the last one
  int64_t last_ = 0;    // the line of the last row of the chunk
};

struct Outputs {
  const std::optional<Tensor>& queries;
  const std::optional<Tensor>& candidates;
  const std::optional<Tensor>& shares;
  const std::optional<Tensor>& scale;
};

template <class T>
class ThreeBlockWalk {
 public:
  ThreeBlockWalk(const Tensor& queries, const Tensor& candidates, const ThreeBlocks<T>& blocks,
                 bool stop_gradient, int64_t rows)
      : queries_(with_blas_layout(queries)), candidates_(with_blas_layout(candidates)),
        blocks_(blocks), stop_gradient_(stop_gradient), rows_(std::min(rows, blocks.n)) {}

  // Writes the losses; with weights, the gradients of sum_i weights_i loss_i that are given.
  void run(double* loss, const double* weights, const Outputs& gradients) {
    ask_for_large_pages(gradients.queries);
    ask_for_large_pages(gradients.candidates);
    std::optional<Tensor> to_queries, to_candidates;
    if (gradients.queries || (gradients.candidates && !stop_gradient_))
      to_queries = new_workspace(queries_, rows_, blocks_.n);
    if (!stop_gradient_) to_candidates = to_queries;
    else if (gradients.candidates) to_candidates = new_workspace(queries_, rows_, blocks_.n);
    Sums sums(blocks_.n);
    Cosines<T> cosines(queries_, candidates_, rows_);
    for_ranges(blocks_.n, rows_, [&](Range range) {
      const ThreeBlockChunk<T> chunk{range.begin, range.size(),      cosines.find(range), loss,
                                     weights,     lines(to_queries), lines(to_candidates)};
      three_block_chunk(blocks_, chunk, gradients.shares || gradients.scale ? &sums.each : nullptr);
      differentiate(range, to_queries, to_candidates, gradients);
    });
    if (gradients.shares) write_shares(sums, *gradients.shares);
    if (gradients.scale)
      *gradients.scale->template mutable_data_ptr<double>() = scale_gradient(sums);
  }

 private:
  struct Sums {
    explicit Sums(int64_t n)
        : shares(4 * n), each{&shares[0], &shares[n], &shares[2 * n], &shares[3 * n], &positives} {}
    std::vector<double> shares;
    double positives = 0;
    const ShareSums each;
  };

  static Lines<T> lines(const std::optional<Tensor>& matrix) {
    if (!matrix) return {nullptr, 0};
    return {matrix->template mutable_data_ptr<T>(), matrix->stride(0)};
  }

  void differentiate(Range range, const std::optional<Tensor>& to_queries,
                     const std::optional<Tensor>& to_candidates, const Outputs& gradients) const {
    const Range rows{0, range.size()};
    if (gradients.queries)
      multiply(part(*gradients.queries, 0, range), part(*to_queries, 0, rows), candidates_, 0,
               blocks_.scale);
    if (gradients.candidates)
      multiply(*gradients.candidates, transposed(part(*to_candidates, 0, rows)),
               part(queries_, 0, range), range.begin > 0, blocks_.scale);
  }

  void write_shares(const Sums& sums, const Tensor& gradient) const {
    T* const out = gradient.mutable_data_ptr<T>();
    for (std::size_t k = 0; k < sums.shares.size(); ++k)
      out[k] = static_cast<T>(blocks_.scale * sums.shares[k]);
  }

  // The scores of the mixed blocks are linear in the shares, so that their sums give the scale's
  // gradient too.
  double scale_gradient(const Sums& sums) const {
    // The shares are one matrix (4, n), in the order of the sums.
    return std::inner_product(sums.shares.begin(), sums.shares.end(), blocks_.own_columns,
                              sums.positives);
  }

  const Tensor queries_, candidates_;
  const ThreeBlocks<T>& blocks_;
  const bool stop_gradient_;
  const int64_t rows_;
};

// Fails where a tensor does not have the dtype, shape or layout that three_block_walk_ reads and
// writes.
void check(const Tensor& queries, const Tensor& candidates, const Tensor& shares,
           const Tensor& loss, const std::optional<Tensor>& weights, const Outputs& gradients) {
  check_queries(queries, false);
  const ScalarType dtype = queries.scalar_type();
  const int64_t N = queries.size(0), D = queries.size(1);
  STD_TORCH_CHECK(N >= 2, "queries: want at least 2 rows, got ", N);
  check_tensor("candidates", candidates, dtype, {N, D}, Layout::kStrided);
  check_tensor("shares", shares, dtype, {4, N}, Layout::kContiguous);
  check_tensor("loss", loss, ScalarType::Double, {N}, Layout::kContiguous);
  check_tensor("weights", weights, ScalarType::Double, {N}, Layout::kContiguous);
  check_tensor("dqueries", gradients.queries, dtype, {N, D}, Layout::kContiguous);
  check_tensor("dcandidates", gradients.candidates, dtype, {N, D}, Layout::kContiguous);
  check_tensor("dshares", gradients.shares, dtype, {4, N}, Layout::kContiguous);
  check_tensor("dscale", gradients.scale, ScalarType::Double, {}, Layout::kContiguous);
  STD_TORCH_CHECK(weights || !(gradients.queries || gradients.candidates || gradients.shares ||
                               gradients.scale),
                  "weights: want them with gradients, got None");
}

// Writes the loss of each row of the problem that fastqt/problem.py calls a ThreeBlockProblem. The
// shares are own_columns, next_columns, own_rows and next_rows. With weights, writes the gradients
// of sum_i weights_i loss_i to those of dqueries, dcandidates, dshares and dscale that are given.
void three_block_walk_(const Tensor queries, const Tensor candidates, const Tensor shares,
                       double scale, bool third_block, bool masks_excluded,
                       double own_mixture_weight, bool stop_gradient, int64_t chunk_rows,
                       const Tensor loss, const std::optional<Tensor> weights,
                       const std::optional<Tensor> dqueries,
                       const std::optional<Tensor> dcandidates, const std::optional<Tensor> dshares,
                       const std::optional<Tensor> dscale) {
  const Outputs gradients{dqueries, dcandidates, dshares, dscale};
  check(queries, candidates, shares, loss, weights, gradients);
  STD_TORCH_CHECK(chunk_rows >= 1, "chunk_rows: want at least 1, got ", chunk_rows);

  const int64_t n = queries.size(0);
  const auto run = [&]<class T>(T) {
    const T* const first = shares.const_data_ptr<T>();
    std::vector<T> before(n);
    std::rotate_copy(first + n, first + 2 * n - 1, first + 2 * n, before.begin());

    const ThreeBlocks<T> blocks{n,
                                static_cast<T>(scale),
                                third_block,
                                masks_excluded,
                                static_cast<T>(own_mixture_weight),
                                first,
                                first + n,
                                first + 2 * n,
                                first + 3 * n,
                                before.data()};

    ThreeBlockWalk<T>(queries, candidates, blocks, stop_gradient, chunk_rows)
        .run(loss.mutable_data_ptr<double>(), weights ? weights->const_data_ptr<double>() : nullptr,
             gradients);
  };

  queries.scalar_type() == ScalarType::Float ? run(float{}) : run(double{});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "three_block_walk_(Tensor queries, Tensor candidates, Tensor shares, float scale, bool "
      "third_block, "
      "bool masks_excluded, float own_mixture_weight, bool stop_gradient, int chunk_rows, "
      "Tensor(a!) loss, "
      "Tensor? weights, Tensor(b!)? dqueries, Tensor(c!)? dcandidates, Tensor(d!)? dshares, "
      "Tensor(e!)? dscale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("three_block_walk_", TORCH_BOX(&three_block_walk_));
}

}  // namespace fastqt
