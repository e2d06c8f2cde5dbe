// The contrastive loss of a small problem and its gradients, in one launch of blocks that all run
// at once.
//
//   products     F G^T, tile by tile, its inner dimension split for the sake of more tiles
//   rows         a warp a row: softmax, loss, dL/dS
//   gradients    dF = s dS G and dG = s dS^T F, tile by tile
//
// with a barrier of the whole grid between them, during which a block fetches what it needs of the
// inputs next. What passes from one to the next stays in the L2 cache. Every sum is taken in an
// order that depends on the sizes and the number of blocks alone.
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
  using Scores = TileProduct<P, Major::K, Major::K, Inexact>;
  using QueryGradient = TileProduct<P, Major::K, Major::MN, Exact>;
  using CandidateGradient = TileProduct<P, Major::MN, Major::MN, Exact>;
  static constexpr int kRingBytes =
      std::max({Scores::kBytes, QueryGradient::kBytes, CandidateGradient::kBytes,
                kWarps * int{sizeof(RowMemory)}});
  // What is in use while the ring is.
  struct Notes {
    uint64_t m16_exact[P::kCosts.m16_tiles];  // as exact_blocks() returns them
    uint32_t exact[kMostDepth];
    double loss[kWarps], by_scale[kWarps];
  };
  static constexpr int kSharedBytes = kRingBytes + int{sizeof(Notes)};
  // float16 has so few exponents that its coefficients are kept relative to the largest that there
  // can be.
  static constexpr bool kRelative = std::is_same_v<V, float16>;

  static FASTQT_DEVICE void run(const SmallProblem& p) {
    if constexpr (kRelative) write_coefficient_bounds(p);
    multiply_scores(p);
    const GridToken scores = arrive_at_grid();

    const int warp = thread_index() / 32, first = block_index() + block_count() * warp;
    RowMemory& memory = reinterpret_cast<RowMemory*>(shared_memory())[warp];

    // While the other blocks finish their scores, the targets are written, which need no score.
    if (first < p.N) RowSoftmax<V>::write_targets(p, first, memory);

    await_grid(scores);
    const float unit = kRelative ? largest_coefficient_bound(p) / kLargest16 : 1;
    for (int row = first; row < p.N; row += block_count() * kWarps) {
      if (row != first) RowSoftmax<V>::write_targets(p, row, memory);
      RowSoftmax<V>(p, row, memory, unit).run();
    }

    const GridToken coefficients = arrive_at_grid();
    fetch_gradient_inputs(p);

    await_grid(coefficients);
    if (block_index() == block_count() - 1) write_totals(p);
    if (p.drow_negatives != nullptr) write_private_gradient(p);
    multiply_gradients(p, unit);
  }

 private:
  static FASTQT_DEVICE Notes& notes() {
    return *reinterpret_cast<Notes*>(shared_memory() + kRingBytes);
  }
  static FASTQT_DEVICE View<V> queries(const SmallProblem& p) {
    return view<V>(p.queries, p.N, p.D, p.D);
  }
  static FASTQT_DEVICE View<V> candidates(const SmallProblem& p) {
    return view<V>(p.candidates, p.M, p.D, p.D);
  }

  static FASTQT_DEVICE void multiply_scores(const SmallProblem& p) {
    const int m16_tiles = ceil_div(p.N, kM16), n8_tiles = p.pitch / kN8,
              steps = ceil_div(p.D, kTileDepth);
    const int tiles = p.tiles.score_down * p.tiles.score_across;

    for (int index = block_index(); index < tiles * p.tiles.splits; index += block_count()) {
      const Area tile =
          tile_at(index % tiles, m16_tiles, p.tiles.score_down, n8_tiles, p.tiles.score_across);
      const int split = index / tiles;

      Sums<P> sums(tile);
      Scores::add(sums, tile, queries(p), {}, candidates(p),
                  part_start(steps, p.tiles.splits, split),
                  part_start(steps, p.tiles.splits, split + 1), p.D, {}, false, [] {});

      float* const part = p.products + int64_t{split} * p.N * p.pitch;
      for_pairs(sums, tile, p.N, p.pitch, [&](int i, int j, float a, float b) {
        *reinterpret_cast<TwoOf<float>*>(part + int64_t{i} * p.pitch + j) = {a, b};
      });
    }
  }

  static FASTQT_DEVICE void write_coefficient_bounds(const SmallProblem& p) {
    const int stride = block_count() * kWarps;
    for (int row = block_index() * kWarps + thread_index() / 32; row < p.N; row += stride) {
      float mass = 0;
      for (int64_t n = p.starts[row] + thread_index() % 32; n < p.starts[row + 1]; n += 32)
        mass += static_cast<float>(p.weights[n]);
      mass = warp_sum(mass);
      if (thread_index() % 32 == 0)
        p.coefficient_bound[row] = mass * fabsf(static_cast<float>(row_weight_of(p, row)));
    }
  }

  // Every warp finds it for itself.
  static FASTQT_DEVICE float largest_coefficient_bound(const SmallProblem& p) {
    float largest = 0;
    for (int row = thread_index() % 32; row < p.N; row += 32)
      largest = fmaxf(largest, p.coefficient_bound[row]);
    largest = warp_max(largest);
    return largest > 0 ? largest : 1;
  }

  static FASTQT_DEVICE void write_totals(const SmallProblem& p) {
    Notes& of_warps = notes();

    double loss = 0, by_scale = 0;
    for (int row = thread_index(); row < p.N; row += kThreads) {
      loss += row_weight_of(p, row) * p.loss[row];
      if (p.dscale != nullptr) by_scale += p.scale_terms[row];
    }

    loss = warp_sum(loss);
    by_scale = warp_sum(by_scale);
    const int warp = thread_index() / 32;
    if (thread_index() % 32 == 0) of_warps.loss[warp] = loss, of_warps.by_scale[warp] = by_scale;
    sync_block();

    if (thread_index() == 0) {
      loss = by_scale = 0;
      for (int n = 0; n < kWarps; ++n) loss += of_warps.loss[n], by_scale += of_warps.by_scale[n];
      if (p.total != nullptr) *p.total = static_cast<float>(loss);
      if (p.dscale != nullptr) *p.dscale = by_scale;
    }
  }

  static FASTQT_DEVICE void write_private_gradient(const SmallProblem& p) {
    const float scale = scale_of(p);
    const auto* const queries = static_cast<const V*>(p.queries);
    const int size = p.N * p.D;
    for (int n = block_index() * kThreads + thread_index(); n < size; n += block_count() * kThreads)
      static_cast<V*>(p.drow_negatives)[n] =
          rounded_to<V>(scale * p.private_coefficients[n / p.D] * to_float(queries[n]));
  }

  struct GradientTile {
    bool is_query;
    Area area;
  };
  static FASTQT_DEVICE int gradient_tiles(const SmallProblem& p) {
    return (p.tiles.query_down + p.tiles.candidate_down) * p.tiles.gradient_across;
  }
  static FASTQT_DEVICE GradientTile gradient_tile(const SmallProblem& p, int index) {
    const int of_queries = p.tiles.query_down * p.tiles.gradient_across,
              n8_tiles = ceil_div(p.D, kN8);
    if (index < of_queries)
      return {true, tile_at(index, ceil_div(p.N, kM16), p.tiles.query_down, n8_tiles,
                            p.tiles.gradient_across)};
    const int m16_tiles = ceil_div(p.M, kM16);
    return {false, tile_at(index - of_queries, m16_tiles, p.tiles.candidate_down, n8_tiles,
                           p.tiles.gradient_across)};
  }

  // Of the block's first tile, before all coefficients are there: the inputs were always.
  static FASTQT_DEVICE void fetch_gradient_inputs(const SmallProblem& p) {
    if (block_index() >= gradient_tiles(p)) return;
    sync_block();  // rows are done with the memory
    const GradientTile tile = gradient_tile(p, block_index());
    if (tile.is_query) {
      QueryGradient::fetch_second(tile.area, candidates(p), 0, ceil_div(p.M, kTileDepth));
    } else {
      CandidateGradient::fetch_second(tile.area, queries(p), 0, ceil_div(p.N, kTileDepth));
    }
  }

  static FASTQT_DEVICE void multiply_gradients(const SmallProblem& p, float unit) {
    for (int index = block_index(); index < gradient_tiles(p); index += block_count()) {
      const GradientTile tile = gradient_tile(p, index);
      const bool is_first = index == block_index();
      tile.is_query ? query_tile(p, unit, tile.area, is_first)
                    : candidate_tile(p, unit, tile.area, is_first);
    }
  }

  static FASTQT_DEVICE void query_tile(const SmallProblem& p, float unit, const Area& tile,
                                       bool is_first) {
    const View<V> a = view<V>(p.coefficients, p.N, p.M, p.pitch),
                  lost = view<V>(p.remainders, p.N, p.M, p.pitch);

    Sums<P> sums(tile);
    QueryGradient::add(sums, tile, a, lost, candidates(p), 0, ceil_div(p.M, kTileDepth), p.M,
                       {notes().exact}, is_first, [&] {
                         const int n = thread_index();
                         if (n < tile.m16_tiles)
                           notes().m16_exact[n] = exact_blocks(p, tile.row() + kM16 * n);
                         sync_block();
                         if (n < kMostDepth) {
                           uint32_t exact = 0;
                           for (int s = 0; s < tile.m16_tiles; ++s)
                             exact |= (notes().m16_exact[s] >> n & 1) << s;
                           notes().exact[n] = exact;
                         }
                         sync_block();
                       });

    const float scale = scale_of(p);
    for_pairs(sums, tile, p.N, p.D, [&](int i, int d, float x, float y) {
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

  static FASTQT_DEVICE void candidate_tile(const SmallProblem& p, float unit, const Area& tile,
                                           bool is_first) {
    const View<V> a = view<V>(p.coefficients, p.N, p.M, p.pitch),
                  lost = view<V>(p.remainders, p.N, p.M, p.pitch);

    Sums<P> sums(tile);
    CandidateGradient::add(
        sums, tile, a, lost, queries(p), 0, ceil_div(p.N, kTileDepth), p.N, {notes().exact},
        is_first, [&] {
          const int n = thread_index();
          if (n < kMostDepth)
            notes().exact[n] = static_cast<uint32_t>(exact_blocks(p, kM16 * n) >> tile.m16_tile);
          sync_block();
        });

    const float factor = scale_of(p) * unit;
    for_pairs(sums, tile, p.M, p.D, [&](int j, int d, float x, float y) {
      store(static_cast<V*>(p.dcandidates), j, d, p.D, factor * x, factor * y);
    });
  }

  // Those of an m16 tile's rows together.
  static FASTQT_DEVICE uint64_t exact_blocks(const SmallProblem& p, int row) {
    uint64_t blocks = 0;
    FASTQT_UNROLL
    for (int n = 0; n < kM16; ++n) blocks |= row + n < p.N ? p.exact_blocks[row + n] : 0;
    return blocks;
  }

  // Calls visit(row, column, x, y) for the lane's sums x and y at two adjacent columns, the first
  // one inside.
  template <class F>
  static FASTQT_DEVICE void for_pairs(const Sums<P>& sums, const Area& tile, int rows, int columns,
                                      const F& visit) {
    FASTQT_UNROLL
    for (int m = 0; m < Sums<P>::kM16Tiles; ++m) FASTQT_UNROLL
    for (int h = 0; h < 2; ++h) FASTQT_UNROLL
    for (int n = 0; n < Sums<P>::kN8Tiles; ++n) {
      const int i = tile.row() + sums.row() + 16 * m + 8 * h,
                j = tile.column() + sums.column() + 8 * n;
      if (m < sums.share.m16_tiles && n < sums.share.n8_tiles && i < rows && j < columns)
        visit(i, j, sums.at[m][n][2 * h], sums.at[m][n][2 * h + 1]);
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
FASTQT_KERNEL(kThreads)
small_kernel(FASTQT_ARGUMENT SmallProblem p) {
  SmallKernel<P>::run(p);
}

}  // namespace fastqt::cuda
