// The innermost part of a matrix product: a tile of the result in registers, and the panels that it is made from.
//
// The product of a (m, k) and b (k, n) is made from panels. A panel of a is a few of its rows, stored so that the
// numbers of one k are adjacent; a panel of b is a few of its columns, stored in the same way. A tile of the result,
// the product of two panels, stays in registers for all k of a block: each step loads one row of the panel of b, and
// for each row of the tile broadcasts one number of the panel of a. With 14 x 32 numbers in a tile of AVX-512 that is
// 28 fused multiply-adds for 16 loads, so that the multipliers never wait for a load.
//
// The vectors are those of GCC and clang. This file is compiled for each level of vector instructions, so that all of
// it is inlined into functions that are compiled for that level.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/vector_math.h"

namespace fastqt {

// Registers of kLanes numbers. A tile has up to kRows rows and kVectors vectors of columns.
template <int kLanesOf, int kRowsOf, int kVectorsOf>
struct TileShape {
  static constexpr int kLanes = kLanesOf, kRows = kRowsOf, kVectors = kVectorsOf;
  static constexpr int kColumns = kLanes * kVectors;
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
};

// A sum in float32 loses digits as it grows. After so many terms it is added to the result.
constexpr int64_t kTerms = 192;

// out = factor * a b, or out + factor * a b, for panels of kRows rows and kVectors vectors. The factor is read from
// memory when it is needed: as a value it would take a register from the sums.
template <class Shape, int kRows, int kVectors>
FASTQT_INLINE void tile_product(int64_t depth, const float* a, const float* b, const float& factor, bool add,
                                float* out, int64_t stride) {
  using Vector = typename Shape::Vector;
  constexpr int kLanes = Shape::kLanes;
  const int64_t blocks = std::max<int64_t>(1, (depth + kTerms - 1) / kTerms);

  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t terms = depth * (block + 1) / blocks - depth * block / blocks;
    Vector sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[i][v] = Vector{};

    for (int64_t k = 0; k < terms; ++k) {
      Vector columns[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) std::memcpy(&columns[v], b + v * kLanes, sizeof(Vector));
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const Vector row = a[i] - Vector{};  // a broadcast: x - 0 is x, for -0 too
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[i][v] += row * columns[v];
      }
      a += kRows;
      b += kVectors * kLanes;
    }

#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* const to = out + i * stride + v * kLanes;
        Vector result = factor * sums[i][v];
        if (add || block > 0) {
          Vector before;
          std::memcpy(&before, to, sizeof(Vector));
          result += before;
        }
        std::memcpy(to, &result, sizeof(Vector));
      }
    }
  }
}

// Where the numbers of a matrix are.
struct Strided {
  const float* data;
  int64_t row_stride, column_stride;

  const float* at(int64_t row, int64_t column) const { return data + row * row_stride + column * column_stride; }
  Strided from(int64_t row, int64_t column) const { return {at(row, column), row_stride, column_stride}; }
  Strided transposed() const { return {data, column_stride, row_stride}; }
};

// Writes the transpose of 4 x 4 numbers, whose rows are `stride` apart in memory, to rows that are `width` apart.
FASTQT_INLINE void transpose_4x4(const float* from, int64_t stride, float* to, int64_t width) {
  typedef float Four __attribute__((vector_size(16)));
  Four rows[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&rows[i], from + i * stride, sizeof(Four));
  const Four a = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
  const Four b = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
  const Four c = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const Four d = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  const Four columns[4] = {
      __builtin_shufflevector(a, c, 0, 1, 4, 5),
      __builtin_shufflevector(a, c, 2, 3, 6, 7),
      __builtin_shufflevector(b, d, 0, 1, 4, 5),
      __builtin_shufflevector(b, d, 2, 3, 6, 7),
  };
  for (int k = 0; k < 4; ++k) std::memcpy(to + k * width, &columns[k], sizeof(Four));
}

// Writes `rows` rows of a matrix and `depth` of its columns to a panel of `width` >= rows: panel[k * width + i] is the
// number in row i and column k, and 0 for further i.
FASTQT_INLINE void pack_panel(const Strided& from, int64_t rows, int64_t depth, float* panel, int64_t width) {
  constexpr int64_t kLine = 16;  // numbers in a line of the cache
  int64_t k = 0;
  if (from.column_stride == 1 && rows >= 4) {
    const int64_t whole = depth - depth % 4;
    for (int64_t end; k < whole; k = end) {
      end = std::min(k + kLine, whole);
      for (int64_t group = 0; group < rows; group += 4) {
        const int64_t i = std::min(group, rows - 4);  // the last four rows may have been among those before
        for (int64_t row = i; row < i + 4; ++row) __builtin_prefetch(from.at(row, k + 2 * kLine));
        for (int64_t column = k; column < end; column += 4)
          transpose_4x4(from.at(i, column), from.row_stride, panel + column * width + i, width);
      }
    }
  }
  for (; k < depth; ++k) {
    const float* const column = from.at(0, k);
    float* const to = panel + k * width;
    if (from.row_stride == 1) {
      __builtin_prefetch(column + 8 * from.column_stride);
      std::copy_n(column, rows, to);
    } else {
      for (int64_t i = 0; i < rows; ++i) to[i] = column[i * from.row_stride];
    }
  }
  if (rows < width)
    for (k = 0; k < depth; ++k) std::fill(panel + k * width + rows, panel + (k + 1) * width, 0.0f);
}

}  // namespace fastqt
