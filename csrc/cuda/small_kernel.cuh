// The contrastive loss of a small problem and its gradients, in one launch of blocks that all run at once.
//
//   products     F G^T, tile by tile, its inner dimension split until every block has a share
//   rows         a warp a row: softmax, loss, dL/dS
//   gradients    dF = s dS G and dG = s dS^T F, tile by tile
//
// with a barrier of the whole grid between them. What passes from one to the next stays in the L2 cache. Every
// sum is taken in an order that depends on the sizes and the number of blocks alone.
#pragma once

#include "cuda/row_softmax.cuh"
#include "cuda/tile_product.cuh"

namespace fastqt::cuda {

template <class T>
struct alignas(2 * sizeof(T)) TwoOf {
  T x, y;
};

template <class P>
struct SmallKernel {
  using V = typename P::Value;
  using Scores = TileProduct<P, Lies::kAlongDepth, Lies::kAlongDepth, kTile>;
  using QueryGradient = TileProduct<P, Lies::kAlongDepth, Lies::kAcrossDepth, kTile>;
  using CandidateGradient = TileProduct<P, Lies::kAcrossDepth, Lies::kAcrossDepth, kTile>;
  static constexpr int kSharedBytes =
      std::max({Scores::kBytes, QueryGradient::kBytes, CandidateGradient::kBytes, kWarps * int{sizeof(RowMemory)}});
  // float16 has so few exponents that its coefficients are kept relative to the largest that there can be.
  static constexpr bool kRelative = std::is_same_v<V, float16>;

  static FASTQT_DEVICE void run(const SmallProblem& p) {
    if constexpr (kRelative) write_influence(p);
    multiply_scores(p);
    sync_grid();
    const float unit = kRelative ? largest_influence(p) / kLargest16 : 1;
    const int warp = thread_index() / 32;
    RowMemory& memory = reinterpret_cast<RowMemory*>(shared_memory())[warp];
    for (int row = block_index() + block_count() * warp; row < p.N; row += block_count() * kWarps)
      RowSoftmax<V>(p, row, memory, unit).run();
    sync_grid();
    if (block_index() == block_count() - 1) write_totals(p);
    if (p.drow_negatives != nullptr) write_private_gradient(p);
    multiply_gradients(p, unit);
  }

 private:
  static FASTQT_DEVICE View<V> queries(const SmallProblem& p) { return view<V>(p.queries, p.N, p.D, p.D); }
  static FASTQT_DEVICE View<V> candidates(const SmallProblem& p) { return view<V>(p.candidates, p.M, p.D, p.D); }

  static FASTQT_DEVICE void multiply_scores(const SmallProblem& p) {
    const int down = ceil_div(p.N, kTile), across = ceil_div(p.M, kTile);
    const int steps = ceil_div(p.D, kTileDepth);
    for (int share = block_index(); share < down * across * p.splits; share += block_count()) {
      const int row = share % down * kTile, column = share / down % across * kTile, split = share / down / across;
      const int first = steps * split / p.splits, end = steps * (split + 1) / p.splits;
      using S = Sums<kTile>;
      const bool idle = row + S::warp_row() >= p.N || column + S::warp_column() >= p.M;
      S sums;
      Scores::add(sums, queries(p), {}, candidates(p), row, column, first, end, 0, idle);
      float* const part = p.products + int64_t{split} * p.N * p.pitch;
      for_pairs(sums, row, column, p.N, p.pitch, [&](int i, int j, float a, float b) {
        *reinterpret_cast<TwoOf<float>*>(part + int64_t{i} * p.pitch + j) = {a, b};
      });
    }
  }

  static FASTQT_DEVICE void write_influence(const SmallProblem& p) {
    const int stride = block_count() * kWarps;
    for (int row = block_index() * kWarps + thread_index() / 32; row < p.N; row += stride) {
      float mass = 0;
      for (int64_t n = p.starts[row] + thread_index() % 32; n < p.starts[row + 1]; n += 32)
        mass += static_cast<float>(p.weights[n]);
      mass = warp_sum(mass);
      if (thread_index() % 32 == 0) p.influence[row] = mass * fabsf(static_cast<float>(row_weight_of(p, row)));
    }
  }

  // Every warp finds it for itself.
  static FASTQT_DEVICE float largest_influence(const SmallProblem& p) {
    float largest = 0;
    for (int row = thread_index() % 32; row < p.N; row += 32) largest = fmaxf(largest, p.influence[row]);
    largest = warp_max(largest);
    return largest > 0 ? largest : 1;
  }

  static FASTQT_DEVICE void write_totals(const SmallProblem& p) {
    double* const shared = reinterpret_cast<double*>(shared_memory());
    double loss = 0, by_scale = 0;
    for (int row = thread_index(); row < p.N; row += kThreads) {
      loss += row_weight_of(p, row) * p.loss[row];
      if (p.dscale != nullptr) by_scale += p.scale_terms[row];
    }
    loss = warp_sum(loss);
    by_scale = warp_sum(by_scale);
    const int warp = thread_index() / 32;
    if (thread_index() % 32 == 0) shared[warp] = loss, shared[kWarps + warp] = by_scale;
    sync_block();
    if (thread_index() == 0) {
      loss = by_scale = 0;
      for (int n = 0; n < kWarps; ++n) loss += shared[n], by_scale += shared[kWarps + n];
      if (p.total != nullptr) *p.total = static_cast<float>(loss);
      if (p.dscale != nullptr) *p.dscale = by_scale;
    }
    sync_block();
  }

  static FASTQT_DEVICE void write_private_gradient(const SmallProblem& p) {
    const float scale = scale_of(p);
    const auto* const queries = static_cast<const V*>(p.queries);
    const int size = p.N * p.D;
    for (int n = block_index() * kThreads + thread_index(); n < size; n += block_count() * kThreads)
      static_cast<V*>(p.drow_negatives)[n] =
          rounded_to<V>(scale * p.private_coefficients[n / p.D] * to_float(queries[n]));
  }

  static FASTQT_DEVICE void multiply_gradients(const SmallProblem& p, float unit) {
    const int across = ceil_div(p.D, kTile);
    const int of_queries = p.dqueries != nullptr ? ceil_div(p.N, kTile) * across : 0;
    const int of_candidates = p.dcandidates != nullptr ? ceil_div(p.M, kTile) * across : 0;
    for (int tile = block_index(); tile < of_queries + of_candidates; tile += block_count()) {
      const bool is_query = tile < of_queries;
      const int index = is_query ? tile : tile - of_queries;
      const int row = index / across * kTile, column = index % across * kTile;
      is_query ? query_tile(p, unit, row, column) : candidate_tile(p, unit, row, column);
    }
  }

  static FASTQT_DEVICE void query_tile(const SmallProblem& p, float unit, int row, int column) {
    const View<V> a = view<V>(p.coefficients, p.N, p.M, p.pitch), lost = view<V>(p.remainders, p.N, p.M, p.pitch);
    uint32_t exact = 0;
    for (int i = row + thread_index() % 32; i < min(row + kTile, p.N); i += 32) exact |= p.exact_blocks[i];
    exact = warp_or(exact);
    Sums<kTile> sums;
    QueryGradient::add(sums, a, lost, candidates(p), row, column, 0, ceil_div(p.M, kTileDepth), exact,
                       idle(p, row, column, p.N));
    const float scale = scale_of(p);
    for_pairs(sums, row, column, p.N, p.D, [&](int i, int d, float x, float y) {
      x *= scale * unit;
      y *= scale * unit;
      if (p.has_private()) {
        const PrivateRow<V> negative(p, i);
        const float c = scale * p.private_coefficients[i] * p.private_inverse_norms[i];
        x += c * negative[d];
        if (d + 1 < p.D) y += c * negative[d + 1];
      }
      store(static_cast<V*>(p.dqueries), i, d, p.D, x, y);
    });
  }

  static FASTQT_DEVICE void candidate_tile(const SmallProblem& p, float unit, int row, int column) {
    const View<V> a = view<V>(p.coefficients, p.N, p.M, p.pitch), lost = view<V>(p.remainders, p.N, p.M, p.pitch);
    const uint32_t own_blocks = ((uint32_t{1} << kTile / 32) - 1) << row / 32;
    uint32_t exact = 0;
    for (int step = 0; step < ceil_div(p.N, 32); ++step) {
      const int i = 32 * step + thread_index() % 32;
      exact |= uint32_t{ballot(i < p.N && (p.exact_blocks[i] & own_blocks) != 0) != 0} << step;
    }
    Sums<kTile> sums;
    CandidateGradient::add(sums, a, lost, queries(p), row, column, 0, ceil_div(p.N, kTileDepth), exact,
                           idle(p, row, column, p.M));
    const float factor = scale_of(p) * unit;
    for_pairs(sums, row, column, p.M, p.D, [&](int j, int d, float x, float y) {
      store(static_cast<V*>(p.dcandidates), j, d, p.D, factor * x, factor * y);
    });
  }

  // Whether the warp's part of a tile of gradients is outside of them.
  static FASTQT_DEVICE bool idle(const SmallProblem& p, int row, int column, int rows) {
    return row + Sums<kTile>::warp_row() >= rows || column + Sums<kTile>::warp_column() >= p.D;
  }

  // Calls visit(row, column, x, y) for the lane's sums x and y at two adjacent columns, the first one inside.
  template <class F>
  static FASTQT_DEVICE void for_pairs(const Sums<kTile>& sums, int row, int column, int rows, int columns,
                                      const F& visit) {
    FASTQT_UNROLL
    for (int m = 0; m < kRowSteps; ++m)
      FASTQT_UNROLL
      for (int h = 0; h < 2; ++h)
        FASTQT_UNROLL
        for (int n = 0; n < Sums<kTile>::kColumnSteps; ++n) {
          const int i = row + sums.row() + 16 * m + 8 * h, j = column + sums.column() + 8 * n;
          if (i < rows && j < columns) visit(i, j, sums.at[m][n][2 * h], sums.at[m][n][2 * h + 1]);
        }
  }

  static FASTQT_DEVICE void store(V* matrix, int row, int column, int width, float x, float y) {
    V* const at = matrix + int64_t{row} * width + column;
    if (width % 2 == 0) {
      *reinterpret_cast<TwoOf<V>*>(at) = {rounded_to<V>(x), rounded_to<V>(y)};
    } else {
      at[0] = rounded_to<V>(x);
      if (column + 1 < width) at[1] = rounded_to<V>(y);
    }
  }
};

template <class P>
FASTQT_KERNEL(kThreads) small_kernel(FASTQT_ARGUMENT SmallProblem p) {
  SmallKernel<P>::run(p);
}

}  // namespace fastqt::cuda
