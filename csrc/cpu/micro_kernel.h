// The innermost part of a matrix product: a tile of the result in registers, and the panels that it is made from.
//
// The product of a (m, k) and b (k, n) is made from panels. A panel of a is a few of its rows, stored so that the
// numbers of one k are adjacent; a panel of b is a few of its columns, stored in the same way. A tile of the result,
// the product of two panels, stays in registers for all k of a block: each step loads one row of the panel of b, and
// for each row of the tile broadcasts one number of the panel of a. With 14 x 32 numbers in a tile of AVX-512 that is
// 28 fused multiply-adds for 16 loads, so that the multipliers never wait for a load.
//
// Where the processor has instructions for it, operands can be rounded to bfloat16. A panel then holds two numbers of
// adjacent k as one of 32 bits, and an instruction multiplies and adds both, in float32: twice as many terms a step.
//
// The vectors are those of GCC and clang. This file is compiled for each level of vector instructions, so that all of
// it is inlined into functions that are compiled for that level.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/vector_math.h"

// GCC has the shuffles of vectors from version 12 on. GCC for Windows keeps vectors of 32 bytes and more at addresses of
// the stack that are not aligned to them.
#if (defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)) && !(defined(_WIN32) && !defined(__clang__))
#if defined(__x86_64__)
#define FASTQT_PANELS_X86 1
#define FASTQT_PANELS 1
#elif defined(__aarch64__)
#define FASTQT_PANELS 1
#endif
#endif

namespace fastqt {

// Where the numbers of a matrix are.
struct Strided {
  const float* data;
  int64_t row_stride, column_stride;

  const float* at(int64_t row, int64_t column) const { return data + row * row_stride + column * column_stride; }
  Strided from(int64_t row, int64_t column) const { return {at(row, column), row_stride, column_stride}; }
  Strided transposed() const { return {data, column_stride, row_stride}; }
};

#ifdef FASTQT_PANELS

// Registers of kLanes numbers. A tile has up to kRows rows and kVectors vectors of columns. Panels hold elements of
// type Element: a float, or two numbers of bfloat16, the first in the lower half.
template <class ElementOf, int kLanesOf, int kRowsOf, int kVectorsOf>
struct TileShape {
  using Element = ElementOf;
  static constexpr int kLanes = kLanesOf, kRows = kRowsOf, kVectors = kVectorsOf;
  static constexpr int kColumns = kLanes * kVectors;
  static constexpr bool kPairs = !std::is_same_v<Element, float>;
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
  typedef Element Elements __attribute__((vector_size(kLanes * sizeof(Element))));

  // How many elements a column of this many numbers has.
  static constexpr int64_t elements(int64_t depth) { return kPairs ? (depth + 1) / 2 : depth; }
};

// A sum in float32 loses digits as it grows. After so many steps it is added to the result.
constexpr int64_t kSteps = 192;

// out = factor * a b, or out + factor * a b, for panels of kRows rows and kVectors vectors, and `depth` elements. The
// factor is read from memory when it is needed: as a value it would take a register from the sums.
template <class Shape, int kRows, int kVectors>
FASTQT_INLINE void tile_product(int64_t depth, const typename Shape::Element* a, const typename Shape::Element* b,
                                const float& factor, bool add, float* out, int64_t stride) {
  using Vector = typename Shape::Vector;
  using Elements = typename Shape::Elements;
  constexpr int kLanes = Shape::kLanes;
  const int64_t blocks = std::max<int64_t>(1, (depth + kSteps - 1) / kSteps);

  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t steps = depth * (block + 1) / blocks - depth * block / blocks;
    Vector sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[i][v] = Vector{};

    for (int64_t k = 0; k < steps; ++k) {
      Elements columns[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) std::memcpy(&columns[v], b + v * kLanes, sizeof(Elements));
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const Elements row = a[i] - Elements{};  // a broadcast: x - 0 is x, for -0 too
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          Vector sum = sums[i][v];  // which is a register; an element of the array would be kept in memory
#ifdef FASTQT_PANELS_X86
          if constexpr (Shape::kPairs) asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(row), "v"(columns[v]));
          else
#endif
            sum += row * columns[v];
          sums[i][v] = sum;
        }
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

// The upper half of a number that is rounded to bfloat16, in its place; a NaN stays one.
FASTQT_INLINE uint32_t rounded_upper_half(uint32_t bits) {
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return (is_nan ? bits | 0x00400000u : bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
}

// The same panel in pairs: panel[k * width + i] has the numbers of columns 2 k and 2 k + 1, the second of which is 0
// beyond the last column.
FASTQT_INLINE void pack_panel(const Strided& from, int64_t rows, int64_t depth, uint32_t* panel, int64_t width) {
  constexpr int64_t kColumns = 32;
  alignas(64) float columns[kColumns * 64];  // of at most 64 rows, as floats
  for (int64_t begin = 0; begin < depth; begin += kColumns) {
    const int64_t count = std::min(kColumns, depth - begin);
    pack_panel(from.from(0, begin), rows, count, columns, width);
    if (count % 2 != 0) std::fill_n(columns + count * width, width, 0.0f);
    for (int64_t k = 0; k < count; k += 2) {
      const float* const pair = columns + k * width;
      uint32_t* const to = panel + (begin + k) / 2 * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i)
        to[i] = rounded_upper_half(std::bit_cast<uint32_t>(pair[i])) >> 16 |
                rounded_upper_half(std::bit_cast<uint32_t>(pair[width + i]));
    }
  }
}

#endif

}  // namespace fastqt
