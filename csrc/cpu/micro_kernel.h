// The innermost part of a matrix product: a tile of the result in registers, and the panels that it
// is made from.
//
// The product of a (m, k) and b (k, n) is made from panels. A panel of a is a few of its rows,
// stored so that the numbers of one k are adjacent; a panel of b is a few of its columns, stored in
// the same way. A tile of the result, the product of two panels, stays in registers for all k of a
// block: each step loads one row of the panel of b, and for each row of the tile broadcasts one
// number of the panel of a. With 14 x 32 numbers in a tile of AVX-512 that is 28 fused
// multiply-adds for 16 loads, so that the multipliers never wait for a load. A broadcast reads one
// number wherever it is: a matrix whose rows or columns are adjacent can take the place of the
// panels of a.
//
// Where the processor has instructions for it, operands can be rounded to bfloat16. A panel then
// holds two numbers of adjacent k as one of 32 bits, and an instruction multiplies and adds both,
// in float32: twice as many terms a step.
//
// The vectors are those of GCC and clang. This file is compiled for each level of vector
// instructions, so that all of it is inlined into functions that are compiled for that level.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/vector_math.h"

// GCC has the shuffles of vectors from version 12 on. GCC for Windows keeps vectors of 32 bytes and
// more at addresses of the stack that are not aligned to them. Clang takes a vector as an operand
// of assembly only in functions that are themselves compiled for its instructions, which what is
// inlined into them is not: it makes broadcasts of its own, and has no products of bfloat16.
#if (defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)) && \
    !(defined(_WIN32) && !defined(__clang__))
#if defined(__x86_64__)
#define FASTQT_PANELS_X86 1
#define FASTQT_PANELS 1
#ifndef __clang__
#define FASTQT_PANELS_ASSEMBLY 1
#endif
#elif defined(__aarch64__)
#define FASTQT_PANELS 1
#endif
#endif

namespace fastqt {

// Where the numbers of a matrix are: floats, or numbers of bfloat16.
struct Strided {
  const void* data;
  int64_t row_stride, column_stride;
  bool is_bfloat16 = false;

  template <class Number = float>
  const Number* at(int64_t row, int64_t column) const {
    return static_cast<const Number*>(data) + row * row_stride + column * column_stride;
  }
  Strided from(int64_t row, int64_t column) const {
    const void* const first =
        is_bfloat16 ? static_cast<const void*>(at<uint16_t>(row, column)) : at(row, column);
    return {first, row_stride, column_stride, is_bfloat16};
  }
  Strided transposed() const { return {data, column_stride, row_stride, is_bfloat16}; }
};

// Where a product or a part of it is written: rows of floats with adjacent columns, or of numbers
// of bfloat16.
struct Rows {
  void* data;
  int64_t stride;
  bool is_bfloat16 = false;

  template <class Number>
  Number* at(int64_t row, int64_t column) const {
    return static_cast<Number*>(data) + row * stride + column;
  }
  Rows from(int64_t row, int64_t column) const {
    void* const first =
        is_bfloat16 ? static_cast<void*>(at<uint16_t>(row, column)) : at<float>(row, column);
    return {first, stride, is_bfloat16};
  }
};

#ifdef FASTQT_PANELS

// Registers of kLanes numbers. A tile has up to kRows rows and kVectors vectors of columns. Panels
// hold elements of type Element: a float, or two numbers of bfloat16, the first in the lower half.
template <class ElementOf, int kLanesOf, int kRowsOf, int kVectorsOf>
struct TileShape {
  using Element = ElementOf;
  static constexpr int kLanes = kLanesOf, kRows = kRowsOf, kVectors = kVectorsOf;
  static constexpr int kColumns = kLanes * kVectors;
  static constexpr bool kPairs = !std::is_same_v<Element, float>;
  // Parts of rows, and of elements, begin anywhere.
  static constexpr int64_t kRowUnit = 1, kUnit = 1;
  // A block of the product has at most so many rows and so many elements in each. Its panels of a,
  // 4 MB, are read from the cache by all panels of b, so that each of these is packed once for them
  // all. The panel of b at hand, 128 kB at most, stays in the second level of the cache.
  static constexpr int64_t kBlockRows = 1024, kBlockElements = 1024;
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
  typedef Element Elements __attribute__((vector_size(kLanes * sizeof(Element))));

  // How many elements a column of this many numbers has.
  static constexpr int64_t elements(int64_t depth) { return kPairs ? (depth + 1) / 2 : depth; }
};

// A sum in float32 loses digits as it grows. After so many steps it is added to the sum of those
// before.
constexpr int64_t kSteps = 192;

// Writes a vector of sums to numbers of bfloat16.
template <class Vector>
FASTQT_INLINE void round_to(const Vector& sums, uint16_t* to) {
#ifdef FASTQT_PANELS_ASSEMBLY
  if constexpr (sizeof(Vector) == 64) {
    typedef uint16_t Halves __attribute__((vector_size(32)));
    Halves rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(sums));
    std::memcpy(to, &rounded, sizeof(Halves));
  }
#endif
}

// The rows of a tile in a matrix whose numbers of one row are adjacent, of which the tile reads a
// column after the other. Addresses of x86 have a base and 1, 2, 4 or 8 times an index, so that a
// pointer serves five rows. Compilers would keep more pointers than there are registers: the
// instruction is written out. Nothing writes to the matrix meanwhile.
class AdjacentColumns {
 public:
  AdjacentColumns(const float* a, int64_t stride)
      : first_(a), sixth_(a + 5 * stride), eleventh_(a + 10 * stride), stride_(stride * kBytes),
        triple_(3 * stride_) {}

  template <class Vector>
  FASTQT_INLINE void broadcast(int row, Vector& to) const {
    const float* const five = row < 5 ? first_ : row < 10 ? sixth_ : eleventh_;
#ifdef FASTQT_PANELS_ASSEMBLY
    switch (row % 5) {  // a constant where the loop over rows is unrolled
      case 0: asm("vbroadcastss (%1), %0" : "=v"(to) : "r"(five)); break;
      case 1: asm("vbroadcastss (%1, %2), %0" : "=v"(to) : "r"(five), "r"(stride_)); break;
      case 2: asm("vbroadcastss (%1, %2, 2), %0" : "=v"(to) : "r"(five), "r"(stride_)); break;
      case 3: asm("vbroadcastss (%1, %2), %0" : "=v"(to) : "r"(five), "r"(triple_)); break;
      default: asm("vbroadcastss (%1, %2, 4), %0" : "=v"(to) : "r"(five), "r"(stride_)); break;
    }
#else
    to = five[row % 5 * (stride_ / kBytes)] - Vector{};
#endif
  }

  FASTQT_INLINE void advance() { ++first_, ++sixth_, ++eleventh_; }

 private:
  static constexpr int64_t kBytes = sizeof(float);

  const float *first_, *sixth_, *eleventh_;
  int64_t stride_, triple_;  // bytes from one row to the next, and three times as many
};

// The rows of a tile where the elements of one column are adjacent: in a matrix, or in a panel of
// kRows rows. What the next tile reads of a matrix is asked for, since no processor foresees
// accesses that are so far apart.
template <class Element, int kRows>
class AdjacentRows {
 public:
  AdjacentRows(const Element* a, int64_t stride) : column_(a), stride_(stride) {}

  template <class Elements>
  FASTQT_INLINE void broadcast(int row, Elements& to) const {
#ifdef FASTQT_PANELS_ASSEMBLY
    asm("vbroadcastss %1, %0" : "=v"(to) : "m"(column_[row]));
#else
    to = column_[row] - Elements{};  // a broadcast: x - 0 is x, for -0 too
#endif
  }

  FASTQT_INLINE void advance() {
    column_ += stride_;
    __builtin_prefetch(column_ + 2 * kRows - 1);
  }

 private:
  const Element* column_;
  int64_t stride_;
};

// to = factor * a b, or from + factor * a b, for kRows rows of a, a panel of kVectors vectors, and
// `depth` elements. The factor is read from memory when it is needed: as a value it would take a
// register from the sums.
template <class Shape, int kRows, int kVectors, class RowsOfA>
FASTQT_INLINE void tile_product(int64_t depth, RowsOfA a, const typename Shape::Element* b,
                                const float& factor, const Rows* from, const Rows& to) {
  using Vector = typename Shape::Vector;
  using Elements = typename Shape::Elements;
  constexpr int kLanes = Shape::kLanes;
  const int64_t blocks = std::max<int64_t>(1, (depth + kSteps - 1) / kSteps);

  // The tile of the result is asked for now, and is there when the sums are. Between the blocks the
  // sums are kept here and not there: where the rows of `out` are a multiple of a page apart, a
  // cache of 8 or 12 ways does not hold them.
  Vector totals[kRows][kVectors] = {};
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVectors; ++v)
      __builtin_prefetch(to.is_bfloat16 ? to.at<float>(0, 0) + i * to.stride / 2 + v * kLanes / 2
                                        : to.at<float>(i, v * kLanes),
                         1);

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
        Elements row;
        a.broadcast(i, row);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          Vector sum =
              sums[i][v];  // which is a register; an element of the array would be kept in memory
#ifdef FASTQT_PANELS_ASSEMBLY
          if constexpr (Shape::kPairs)
            asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(row), "v"(columns[v]));
          else
#endif
            sum += row * columns[v];
          sums[i][v] = sum;
        }
      }
      a.advance();
      b += kVectors * kLanes;
    }

    const bool is_last = block + 1 == blocks;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        Vector total = sums[i][v];
        if (block > 0) total += totals[i][v];
        if (!is_last) {
          totals[i][v] = total;
          continue;
        }

        Vector result = factor * total;
        if (from != nullptr) {
          Vector before;
          std::memcpy(&before, from->at<float>(i, v * kLanes), sizeof(Vector));
          result += before;
        }
        if (Shape::kPairs && to.is_bfloat16) round_to(result, to.at<uint16_t>(i, v * kLanes));
        else std::memcpy(to.at<float>(i, v * kLanes), &result, sizeof(Vector));
      }
    }
  }
}

#endif

}  // namespace fastqt
