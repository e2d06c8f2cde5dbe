// A block's tile of a matrix product: 128 x kColumns sums over an inner dimension, "depth".
//
// Operands come through a ring of stages in shared memory, some of them still on their way while the
// oldest is multiplied: by tensor cores, or for full float32 by ordinary arithmetic.
#pragma once

#include "cuda/device.h"

namespace fastqt::cuda {

constexpr int kStages = 4;
constexpr int kWarpsDown = 2, kWarpsAcross = 4;
constexpr int kWarpRows = kTile / kWarpsDown;
constexpr int kRowSteps = kWarpRows / 16;

// How a matrix lies in memory, as an operand: its elements adjacent along the depth, or along the other dimension.
enum class Lies { kAlongDepth, kAcrossDepth };

// A matrix of `lines` times `width` elements; whole vectors of 16 bytes may be read if `aligned`.
template <class V>
struct View {
  const V* data;
  int lines, width, stride;
  bool aligned;
};

template <class V>
FASTQT_DEVICE View<V> view(const void* data, int lines, int width, int stride) {
  const bool aligned = (stride * int{sizeof(V)} % 16 == 0) && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  return {static_cast<const V*>(data), lines, width, stride, aligned};
}

// Of a stage in shared memory: `kExtent` rows (of the first operand) or columns (of the second) times kTileDepth.
// Lines are padded so that the lanes of a warp find their elements in different banks.
template <class V, Lies kLies, int kExtent>
struct Stage {
  static constexpr bool kAlong = kLies == Lies::kAlongDepth;
  static constexpr int kLines = kAlong ? kExtent : kTileDepth;
  static constexpr int kWidth = kAlong ? kTileDepth : kExtent;
  static constexpr int kPitch = kWidth + (kAlong ? 16 / int{sizeof(V)} : 8);
  static constexpr int kSize = kLines * kPitch;

  static FASTQT_DEVICE int at(int extent, int depth) {
    return kAlong ? extent * kPitch + depth : depth * kPitch + extent;
  }

  // Starts to copy the part of the matrix that begins at (extent, depth); what is outside of it is 0.
  static FASTQT_DEVICE void fetch(V* stage, const View<V>& matrix, int extent, int depth) {
    constexpr int kVector = 16 / int{sizeof(V)}, kVectors = kWidth / kVector;
    const int first_line = kAlong ? extent : depth, first = kAlong ? depth : extent;
    FASTQT_UNROLL
    for (int n = 0; n < kLines * kVectors / kThreads; ++n) {
      const int index = n * kThreads + thread_index();
      const int line = index / kVectors, offset = index % kVectors * kVector;
      V* const to = stage + line * kPitch + offset;
      const bool inside = first_line + line < matrix.lines;
      const int valid = inside ? max(0, min(kVector, matrix.width - first - offset)) : 0;
      const V* const from = matrix.data + (valid > 0 ? int64_t{first_line + line} * matrix.stride + first + offset : 0);
      if (matrix.aligned) {
        copy_ahead(to, from, valid * int{sizeof(V)});
      } else {
        FASTQT_UNROLL_BY(1)
        for (int k = 0; k < kVector; ++k) to[k] = k < valid ? from[k] : V{};
      }
    }
  }
};

// A warp's sums: those of the tile's rows row() + 16 m + 8 h and columns column() + 8 n + k, at [m][n][2 h + k].
template <int kColumns>
struct Sums {
  static constexpr int kWarpColumns = kColumns / kWarpsAcross;
  static constexpr int kColumnSteps = kWarpColumns / 8;

  float at[kRowSteps][kColumnSteps][4] = {};

  static FASTQT_DEVICE int warp_row() { return thread_index() / 32 % kWarpsDown * kWarpRows; }
  static FASTQT_DEVICE int warp_column() { return thread_index() / 32 / kWarpsDown * kWarpColumns; }
  static FASTQT_DEVICE int row() { return warp_row() + thread_index() % 32 / 4; }
  static FASTQT_DEVICE int column() { return warp_column() + thread_index() % 4 * 2; }
};

// 16-bit elements, 16 of the depth at a time.
template <class T>
struct HalfArithmetic {
  using Value = T;
  static constexpr bool kStoresRemainders = true;

  template <class A>
  static FASTQT_DEVICE void load_rows(uint32_t (&a)[4], const T* stage, int row, int depth) {
    const int lane = thread_index() % 32;
    if constexpr (A::kAlong) {
      load_matrices(a, stage + A::at(row + lane % 16, depth + lane / 16 * 8));
    } else {
      load_matrices_transposed(a, stage + A::at(row + lane / 8 % 2 * 8, depth + lane % 8 + lane / 16 * 8));
    }
  }

  // 16 columns, as the two halves of 8 that are multiplied apart.
  template <class B>
  static FASTQT_DEVICE void load_columns(uint32_t (&b)[4], const T* stage, int column, int depth) {
    const int lane = thread_index() % 32;
    if constexpr (B::kAlong) {
      load_matrices(b, stage + B::at(column + lane % 8 + lane / 16 * 8, depth + lane / 8 % 2 * 8));
    } else {
      load_matrices_transposed(b, stage + B::at(column + lane / 16 * 8, depth + lane % 16));
    }
  }

  template <class A, class B, int kColumns>
  static FASTQT_DEVICE void multiply(Sums<kColumns>& sums, const T* a_stage, const T* remainder_stage,
                                     const T* b_stage, bool exact) {
    using S = Sums<kColumns>;
    FASTQT_UNROLL
    for (int depth = 0; depth < kTileDepth; depth += 16) {
      uint32_t b[S::kColumnSteps / 2][4];
      FASTQT_UNROLL
      for (int n = 0; n < S::kColumnSteps / 2; ++n)
        load_columns<B>(b[n], b_stage, S::warp_column() + 16 * n, depth);
      add_product<A>(sums, a_stage, b, depth);
      if (exact) add_product<A>(sums, remainder_stage, b, depth);
    }
  }

  template <class A, int kColumns, int kPairs>
  static FASTQT_DEVICE void add_product(Sums<kColumns>& sums, const T* a_stage, const uint32_t (&b)[kPairs][4],
                                        int depth) {
    FASTQT_UNROLL
    for (int m = 0; m < kRowSteps; ++m) {
      uint32_t a[4];
      load_rows<A>(a, a_stage, sums.warp_row() + 16 * m, depth);
      FASTQT_UNROLL
      for (int n = 0; n < kPairs; ++n) {
        multiply_add(sums.at[m][2 * n], a, {b[n][0], b[n][1]}, T{});
        multiply_add(sums.at[m][2 * n + 1], a, {b[n][2], b[n][3]}, T{});
      }
    }
  }
};

// float32 rounded to tf32, 8 of the depth at a time.
struct Tf32Arithmetic {
  using Value = float;
  static constexpr bool kStoresRemainders = false;

  template <class A, class B, int kColumns>
  static FASTQT_DEVICE void multiply(Sums<kColumns>& sums, const float* a_stage, const float*, const float* b_stage,
                                     bool exact) {
    using S = Sums<kColumns>;
    const int t = thread_index() % 4, g = thread_index() % 32 / 4;
    FASTQT_UNROLL_BY(2)
    for (int depth = 0; depth < kTileDepth; depth += 8) {
      uint32_t b[S::kColumnSteps][2];
      FASTQT_UNROLL
      for (int n = 0; n < S::kColumnSteps; ++n)
        FASTQT_UNROLL
        for (int h = 0; h < 2; ++h)
          b[n][h] = to_tf32(b_stage[B::at(S::warp_column() + 8 * n + g, depth + t + 4 * h)]);
      add_product<A, false>(sums, a_stage, b, depth);
      if (exact) add_product<A, true>(sums, a_stage, b, depth);
    }
  }

  // Of the first operand, or of what it loses in rounding.
  template <class A, bool kOfRemainders, int kColumns, int kColumnSteps>
  static FASTQT_DEVICE void add_product(Sums<kColumns>& sums, const float* a_stage,
                                        const uint32_t (&b)[kColumnSteps][2], int depth) {
    FASTQT_UNROLL
    for (int m = 0; m < kRowSteps; ++m) {
      uint32_t a[4];
      FASTQT_UNROLL
      for (int h = 0; h < 4; ++h) {
        const float x = a_stage[A::at(sums.row() + 16 * m + h % 2 * 8, depth + thread_index() % 4 + h / 2 * 4)];
        a[h] = to_tf32(x);
        if (kOfRemainders) a[h] = to_tf32(x - from_bits(a[h]));
      }
      FASTQT_UNROLL
      for (int n = 0; n < kColumnSteps; ++n) multiply_add_tf32(sums.at[m][n], a, b[n]);
    }
  }
};

// float32 in full.
struct FloatArithmetic {
  using Value = float;
  static constexpr bool kStoresRemainders = false;

  template <class A, class B, int kColumns>
  static FASTQT_DEVICE void multiply(Sums<kColumns>& sums, const float* a_stage, const float*, const float* b_stage,
                                     bool) {
    using S = Sums<kColumns>;
    FASTQT_UNROLL_BY(4)
    for (int depth = 0; depth < kTileDepth; ++depth) {
      float b[S::kColumnSteps][2];
      FASTQT_UNROLL
      for (int n = 0; n < S::kColumnSteps; ++n)
        FASTQT_UNROLL
        for (int k = 0; k < 2; ++k) b[n][k] = b_stage[B::at(S::column() + 8 * n + k, depth)];
      FASTQT_UNROLL
      for (int m = 0; m < kRowSteps; ++m)
        FASTQT_UNROLL
        for (int h = 0; h < 2; ++h) {
          const float a = a_stage[A::at(S::row() + 16 * m + 8 * h, depth)];
          FASTQT_UNROLL
          for (int n = 0; n < S::kColumnSteps; ++n)
            FASTQT_UNROLL
            for (int k = 0; k < 2; ++k) sums.at[m][n][2 * h + k] += a * b[n][k];
        }
    }
  }
};

FASTQT_DEVICE bool has(uint32_t steps, int step) { return step < 32 && (steps >> step & 1); }

// The product of `a` (rows, depth) and `b` (depth, columns) at the tile that begins at (row, column), over the
// given steps of kTileDepth. In steps whose bit in `exact` is set, what `a` lost in rounding counts too.
template <class P, Lies kA, Lies kB, int kColumns>
struct TileProduct {
  using V = typename P::Value;
  using A = Stage<V, kA, kTile>;
  using B = Stage<V, kB, kColumns>;
  static constexpr int kRemainder = A::kSize, kSecond = (P::kStoresRemainders ? 2 : 1) * A::kSize;
  static constexpr int kStageSize = kSecond + B::kSize;
  static constexpr int kBytes = kStages * kStageSize * int{sizeof(V)};

  static FASTQT_DEVICE void add(Sums<kColumns>& sums, const View<V>& a, const View<V>& remainders, const View<V>& b,
                                int row, int column, int first_step, int end_step, uint32_t exact, bool idle) {
    V* const ring = reinterpret_cast<V*>(shared_memory());
    const auto fetch = [&](int step) {
      if (step < end_step) {
        V* const stage = ring + (step - first_step) % kStages * kStageSize;
        A::fetch(stage, a, row, step * kTileDepth);
        if (P::kStoresRemainders && has(exact, step)) A::fetch(stage + kRemainder, remainders, row, step * kTileDepth);
        B::fetch(stage + kSecond, b, column, step * kTileDepth);
      }
      commit_copies();
    };
    // Fetches run ahead of products: before the first product there are only fetches.
    FASTQT_UNROLL_BY(1)
    for (int step = first_step - (kStages - 1); step < end_step; ++step) {
      const bool multiplies = step >= first_step;
      if (multiplies) {
        await_copies<kStages - 2>();
        sync_block();  // what this step reads is there, and all are done with the stage that is fetched next
      }
      fetch(step + kStages - 1);
      if (!multiplies || idle) continue;
      const V* const stage = ring + (step - first_step) % kStages * kStageSize;
      P::template multiply<A, B>(sums, stage, stage + kRemainder, stage + kSecond, has(exact, step));
    }
    sync_block();  // the ring is free for others
  }
};

}  // namespace fastqt::cuda
