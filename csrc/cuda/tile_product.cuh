// A block's tile of a matrix product: a sum for each of its rows and columns over an inner
// dimension, "depth".
//
// Operands come through a ring of stages in shared memory, some of them still on their way while
// the oldest is multiplied: by tensor cores, or for full float32 by ordinary arithmetic.
#pragma once

#include <bit>

#include "cuda/device.h"
#include "cuda/tiling.h"

namespace fastqt::cuda {

constexpr int kStages = 4;
constexpr int kAhead = kStages - 1;           // steps of the depth that copies run ahead
constexpr int kMostDepth = kMostRows / kM16;  // of a gradient's, in blocks of 16

// Along which dimension an operand's elements are adjacent in memory: the depth (K), or the other
// one (M or N).
enum class Major { K, MN };

// A matrix of `lines` times `width` elements; whole vectors of 16 bytes may be read if `aligned`.
template <class V>
struct View {
  const V* data;
  int lines, width, stride;
  bool aligned;
};

template <class V>
FASTQT_DEVICE View<V> view(const void* data, int lines, int width, int stride) {
  const bool aligned =
      (stride * int{sizeof(V)} % 16 == 0) && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return {static_cast<const V*>(data), lines, width, stride, aligned};
}

// Of a stage in shared memory: at most `kExtent` rows (of the first operand) or columns (of the
// second) times kTileDepth. Lines are padded so that the lanes of a warp find their elements in
// different banks.
template <class V, Major kMajor, int kExtent>
struct Stage {
  static constexpr bool kIsKMajor = kMajor == Major::K;
  static constexpr int kLines = kIsKMajor ? kExtent : kTileDepth;
  static constexpr int kWidth = kIsKMajor ? kTileDepth : kExtent;
  static constexpr int kPitch = kWidth + (kIsKMajor ? 16 / int{sizeof(V)} : 8);
  static constexpr int kSize = kLines * kPitch;

  static FASTQT_DEVICE int at(int extent, int depth) {
    return kIsKMajor ? extent * kPitch + depth : depth * kPitch + extent;
  }

  // Starts to copy the part of the matrix that begins at (first_extent, first_depth), as far as
  // `extents` and where wanted(extent, depth) holds for the first element of a vector. What is
  // outside of the matrix is 0.
  template <class F>
  static FASTQT_DEVICE void fetch(V* stage, const View<V>& matrix, int first_extent, int extents,
                                  int first_depth, const F& wanted) {
    constexpr int kVector = 16 / int{sizeof(V)};
    // A power of two of threads for a line, of which some may have nothing to do.
    constexpr int kSpan = int(std::bit_ceil(unsigned{kWidth / kVector})),
                  kLinesAtOnce = kThreads / kSpan;

    const int first_line = kIsKMajor ? first_extent : first_depth,
              first = kIsKMajor ? first_depth : first_extent;

    const int offset = thread_index() % kSpan * kVector;
    if (offset >= (kIsKMajor ? kTileDepth : extents)) return;

    const int lines = kIsKMajor ? extents : kTileDepth;
    const int wide = max(0, min(kVector, matrix.width - first - offset));

    FASTQT_UNROLL_BY(1)
    for (int line = thread_index() / kSpan; line < lines; line += kLinesAtOnce) {
      if (!wanted(kIsKMajor ? line : offset, kIsKMajor ? offset : line)) continue;

      V* const to = stage + line * kPitch + offset;
      const int valid = first_line + line < matrix.lines ? wide : 0;
      const V* const from =
          matrix.data +
          (valid > 0 ? int64_t{first_line + line} * matrix.stride + first + offset : 0);

      if (matrix.aligned) {
        cp_async_16B(to, from, valid * int{sizeof(V)});
      } else {
        FASTQT_UNROLL_BY(1)
        for (int k = 0; k < kVector; ++k) to[k] = k < valid ? from[k] : V{};
      }
    }
  }

  static FASTQT_DEVICE void fetch(V* stage, const View<V>& matrix, int first_extent, int extents,
                                  int first_depth) {
    fetch(stage, matrix, first_extent, extents, first_depth, [](int, int) { return true; });
  }
};

// A warp's sums: those of its share's rows row() + 16 m + 8 h and columns column() + 8 n + k,
// counted from the tile's corner, at [m][n][2 h + k].
template <class P>
struct Sums {
  static constexpr int kM16Tiles = P::kCosts.m16_tiles / kHalves,
                       kN8Tiles = P::kCosts.n8_tiles / kQuarters;

  const Area share;
  float at[kM16Tiles][kN8Tiles][4] = {};

  explicit FASTQT_DEVICE Sums(const Area& tile) : share(warp_share(tile, thread_index() / 32)) {}

  FASTQT_DEVICE int row() const { return share.row() + thread_index() % 32 / 4; }
  FASTQT_DEVICE int column() const { return share.column() + thread_index() % 4 * 2; }
};

// Which blocks of 16 x 16 of a tile's first operand have lost something in rounding that counts:
// bit s of m16_bits[k] is for rows 16 s and depths 16 k of the tile. In shared memory.
struct Exact {
  const uint32_t* m16_bits;

  FASTQT_DEVICE bool operator()(int m16_tile, int depth) const {
    return m16_bits[depth / kM16] >> m16_tile & 1;
  }
};
// None of them.
struct Inexact {};

// 16-bit elements, 16 of the depth at a time.
template <class T>
struct HalfArithmetic {
  using Value = T;
  static constexpr TileCosts kCosts = kHalfCosts;
  static constexpr bool kStoresRemainders = true;

  template <class A>
  static FASTQT_DEVICE void load_rows(uint32_t (&a)[4], const T* stage, int row, int depth) {
    const int lane = thread_index() % 32;
    if constexpr (A::kIsKMajor) {
      load_matrices(a, stage + A::at(row + lane % 16, depth + lane / 16 * 8));
    } else {
      load_matrices_transposed(
          a, stage + A::at(row + lane / 8 % 2 * 8, depth + lane % 8 + lane / 16 * 8));
    }
  }

  // 16 columns, as the two halves of 8 that are multiplied apart; or the first half twice.
  template <class B>
  static FASTQT_DEVICE void load_columns(uint32_t (&b)[4], const T* stage, int column, int depth,
                                         bool both) {
    const int lane = thread_index() % 32, second = both ? lane / 16 * 8 : 0;
    if constexpr (B::kIsKMajor) {
      load_matrices(b, stage + B::at(column + lane % 8 + second, depth + lane / 8 % 2 * 8));
    } else {
      load_matrices_transposed(b, stage + B::at(column + second, depth + lane % 16));
    }
  }

  template <class A, class B, class S, class E>
  static FASTQT_DEVICE void multiply(S& sums, const T* a_stage, const T* remainder_stage,
                                     const T* b_stage, int first_depth, int depths,
                                     const E& exact) {
    constexpr int kPairs = ceil_div(S::kN8Tiles, 2);
    FASTQT_UNROLL
    for (int depth = 0; depth < kTileDepth; depth += 16) {
      if (depth >= depths) break;

      uint32_t b[kPairs][4];
      FASTQT_UNROLL
      for (int n = 0; n < kPairs; ++n)
        if (2 * n < sums.share.n8_tiles)
          load_columns<B>(b[n], b_stage, sums.share.column() + 16 * n, depth,
                          2 * n + 1 < sums.share.n8_tiles);

      FASTQT_UNROLL
      for (int m = 0; m < S::kM16Tiles; ++m) {
        if (m >= sums.share.m16_tiles) break;
        add_product<A>(sums, m, a_stage, b, depth);
        if constexpr (!std::is_same_v<E, Inexact>)
          if (exact(sums.share.m16_tile + m, first_depth + depth))
            add_product<A>(sums, m, remainder_stage, b, depth);
      }
    }
  }

  template <class A, class S, int kPairs>
  static FASTQT_DEVICE void add_product(S& sums, int m, const T* a_stage,
                                        const uint32_t (&b)[kPairs][4], int depth) {
    uint32_t a[4];
    load_rows<A>(a, a_stage, sums.share.row() + 16 * m, depth);
    FASTQT_UNROLL
    for (int n = 0; n < S::kN8Tiles; ++n)
      if (n < sums.share.n8_tiles)
        multiply_add(sums.at[m][n], a, {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]}, T{});
  }
};

// float32 rounded to tf32, 8 of the depth at a time.
struct Tf32Arithmetic {
  using Value = float;
  static constexpr TileCosts kCosts = kTf32Costs;
  static constexpr bool kStoresRemainders = false;

  template <class A, class B, class S, class E>
  static FASTQT_DEVICE void multiply(S& sums, const float* a_stage, const float*,
                                     const float* b_stage, int first_depth, int depths,
                                     const E& exact) {
    const int t = thread_index() % 4, g = thread_index() % 32 / 4;
    FASTQT_UNROLL_BY(2)
    for (int depth = 0; depth < depths; depth += 8) {
      uint32_t b[S::kN8Tiles][2];
      FASTQT_UNROLL
      for (int n = 0; n < S::kN8Tiles; ++n)
        if (n < sums.share.n8_tiles) FASTQT_UNROLL
      for (int h = 0; h < 2; ++h)
        b[n][h] = to_tf32(b_stage[B::at(sums.share.column() + 8 * n + g, depth + t + 4 * h)]);

      FASTQT_UNROLL
      for (int m = 0; m < S::kM16Tiles; ++m) {
        if (m >= sums.share.m16_tiles) break;
        add_product<A, false>(sums, m, a_stage, b, depth);
        if constexpr (!std::is_same_v<E, Inexact>)
          if (exact(sums.share.m16_tile + m, first_depth + depth))
            add_product<A, true>(sums, m, a_stage, b, depth);
      }
    }
  }

  // Of the first operand, or of what it loses in rounding.
  template <class A, bool kOfRemainders, class S>
  static FASTQT_DEVICE void add_product(S& sums, int m, const float* a_stage,
                                        const uint32_t (&b)[S::kN8Tiles][2], int depth) {
    uint32_t a[4];
    FASTQT_UNROLL
    for (int h = 0; h < 4; ++h) {
      const float x =
          a_stage[A::at(sums.row() + 16 * m + h % 2 * 8, depth + thread_index() % 4 + h / 2 * 4)];
      a[h] = to_tf32(x);
      if (kOfRemainders) a[h] = to_tf32(x - from_bits(a[h]));
    }
    FASTQT_UNROLL
    for (int n = 0; n < S::kN8Tiles; ++n)
      if (n < sums.share.n8_tiles) multiply_add_tf32(sums.at[m][n], a, b[n]);
  }
};

// float32 in full.
struct FloatArithmetic {
  using Value = float;
  static constexpr TileCosts kCosts = kFloatCosts;
  static constexpr bool kStoresRemainders = false;

  template <class A, class B, class S, class E>
  static FASTQT_DEVICE void multiply(S& sums, const float* a_stage, const float*,
                                     const float* b_stage, int, int depths, const E&) {
    FASTQT_UNROLL_BY(4)
    for (int depth = 0; depth < depths; ++depth) {
      float b[S::kN8Tiles][2];
      FASTQT_UNROLL
      for (int n = 0; n < S::kN8Tiles; ++n) FASTQT_UNROLL
      for (int k = 0; k < 2; ++k)
        b[n][k] = n < sums.share.n8_tiles ? b_stage[B::at(sums.column() + 8 * n + k, depth)] : 0;

      FASTQT_UNROLL
      for (int m = 0; m < S::kM16Tiles; ++m) {
        if (m >= sums.share.m16_tiles) break;
        FASTQT_UNROLL
        for (int h = 0; h < 2; ++h) {
          const float a = a_stage[A::at(sums.row() + 16 * m + 8 * h, depth)];
          FASTQT_UNROLL
          for (int n = 0; n < S::kN8Tiles; ++n)
            if (n < sums.share.n8_tiles) FASTQT_UNROLL
          for (int k = 0; k < 2; ++k) sums.at[m][n][2 * h + k] += a * b[n][k];
        }
      }
    }
  }
};

// The product of `a` (rows, depth) and `b` (depth, columns) at a tile, over the steps `first` ..
// `end` - 1 of kTileDepth of the depth. What the first operand lost in rounding counts where `E`
// says, Exact or Inexact.
template <class P, Major kA, Major kB, class E>
struct TileProduct {
  using V = typename P::Value;
  using A = Stage<V, kA, kM16 * P::kCosts.m16_tiles>;
  using B = Stage<V, kB, kN8 * P::kCosts.n8_tiles>;
  static constexpr bool kHasRemainders = P::kStoresRemainders && std::is_same_v<E, Exact>;
  static constexpr int kRemainder = A::kSize, kSecond = (kHasRemainders ? 2 : 1) * A::kSize;
  static constexpr int kStageSize = kSecond + B::kSize;
  static constexpr int kBytes = kStages * kStageSize * int{sizeof(V)};

  static FASTQT_DEVICE V* stage(int n) {
    return reinterpret_cast<V*>(shared_memory()) + n % kStages * kStageSize;
  }

  // Starts to copy what add() multiplies first of its second operand, as nobody uses the ring until
  // then.
  static FASTQT_DEVICE void fetch_second(const Area& tile, const View<V>& b, int first, int end) {
    for (int n = 0; n < min(kAhead, end - first); ++n)
      B::fetch(stage(n) + kSecond, b, tile.column(), tile.columns(), (first + n) * kTileDepth);
  }

  // `prepare` makes what `exact` reads, while the first copies are on their way; nothing if
  // fetch_second() was called already for the same operand.
  template <class F>
  static FASTQT_DEVICE void add(Sums<P>& sums, const Area& tile, const View<V>& a,
                                const View<V>& remainders, const View<V>& b, int first, int end,
                                int depth, const E& exact, bool has_second, const F& prepare) {
    const auto fetch = [&](int n) {
      if (first + n < end) {
        const int from = (first + n) * kTileDepth;
        A::fetch(stage(n), a, tile.row(), tile.rows(), from);
        if (!has_second || n >= kAhead)
          B::fetch(stage(n) + kSecond, b, tile.column(), tile.columns(), from);

        if (n == 0) prepare();
        if constexpr (kHasRemainders)
          A::fetch(stage(n) + kRemainder, remainders, tile.row(), tile.rows(), from,
                   [&](int row, int d) { return exact(row / kM16, from + d); });
      }
      commit_copies();
    };

    // Fetches run ahead of products: before the first product there are only fetches.
    FASTQT_UNROLL_BY(1)
    for (int n = -kAhead; first + n < end; ++n) {
      if (n >= 0) {
        await_copies<kAhead - 1>();
        sync_block();  // what this step reads is there, and all are done with the stage that is
                       // fetched next
      }
      fetch(n + kAhead);
      if (n < 0) continue;

      const V* const at = stage(n);
      const int from = (first + n) * kTileDepth;
      P::template multiply<A, B>(sums, at, at + kRemainder, at + kSecond, from,
                                 min(kTileDepth, depth - from), exact);
    }

    sync_block();  // the ring is free for others
  }
};

}  // namespace fastqt::cuda
