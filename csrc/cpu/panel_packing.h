// Copies rows and columns of matrices into the panels of micro_kernel.h: transposes them, and makes
// pairs of bfloat16.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/micro_kernel.h"

namespace fastqt {

#ifdef FASTQT_PANELS

template <int kLanes>
struct Floats {
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
};

// out = the numbers of a and then b at the places place(0), place(1), ... A number of b counts from
// kLanes on.
template <class Vector, class Place, int... kLane>
FASTQT_INLINE void shuffle(const Vector& a, const Vector& b, Place place,
                           std::integer_sequence<int, kLane...>, Vector& out) {
  out = __builtin_shufflevector(a, b, place(kLane)...);
}

// Joins the halves of a and b within each four numbers, or the fours themselves, to two vectors, as
// instructions of x86 do: `kNumbers` are taken from a and as many from b in turn. `kHalf` is 0 for
// the lower halves and 1 for the upper.
template <int kLanes, int kNumbers, int kHalf>
struct Interleaved {
  constexpr int operator()(int lane) const {
    const int of_four = lane % 4, source = of_four / kNumbers % 2;
    return lane / 4 * 4 + kHalf * 2 + (kNumbers == 1 ? of_four / 2 : of_four % 2) + source * kLanes;
  }
};

// The fours of a and then b with even numbers, or with odd ones.
template <int kLanes, int kOdd>
struct Fours {
  constexpr int operator()(int lane) const {
    const int four = lane / 4 * 2 + kOdd;
    return four % (kLanes / 4) * 4 + lane % 4 + (four < kLanes / 4 ? 0 : kLanes);
  }
};

// Transposes a matrix of kLanes x kLanes numbers whose rows are vectors.
template <int kLanes>
FASTQT_INLINE void transpose(typename Floats<kLanes>::Vector (&rows)[kLanes]) {
  using Vector = typename Floats<kLanes>::Vector;
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>{};
  constexpr int kGroups = kLanes / 4;

  // Four rows to four vectors, each with four columns: every fourth column of these rows.
#pragma GCC unroll 4
  for (int group = 0; group < kGroups; ++group) {
    Vector* const of_group = rows + 4 * group;
    Vector low[2], high[2];
    for (int pair = 0; pair < 2; ++pair) {
      shuffle(of_group[2 * pair], of_group[2 * pair + 1], Interleaved<kLanes, 1, 0>{}, kAll,
              low[pair]);
      shuffle(of_group[2 * pair], of_group[2 * pair + 1], Interleaved<kLanes, 1, 1>{}, kAll,
              high[pair]);
    }
    shuffle(low[0], low[1], Interleaved<kLanes, 2, 0>{}, kAll, of_group[0]);
    shuffle(low[0], low[1], Interleaved<kLanes, 2, 1>{}, kAll, of_group[1]);
    shuffle(high[0], high[1], Interleaved<kLanes, 2, 0>{}, kAll, of_group[2]);
    shuffle(high[0], high[1], Interleaved<kLanes, 2, 1>{}, kAll, of_group[3]);
  }

  // Joins the groups of rows: two of them, then two of these pairs.
  if constexpr (kGroups > 1) {
#pragma GCC unroll 4
    for (int column = 0; column < 4; ++column) {
      Vector joined[kGroups];
      for (int group = 0; group < kGroups; group += 2) {
        const Vector &upper = rows[4 * group + column], &lower = rows[4 * (group + 1) + column];
        shuffle(upper, lower, Fours<kLanes, 0>{}, kAll, joined[group]);
        shuffle(upper, lower, Fours<kLanes, 1>{}, kAll, joined[group + 1]);
      }
      if constexpr (kGroups == 2) {
        for (int group = 0; group < 2; ++group) rows[4 * group + column] = joined[group];
      } else {
        for (int odd = 0; odd < 2; ++odd) {
          shuffle(joined[odd], joined[2 + odd], Fours<kLanes, 0>{}, kAll, rows[4 * odd + column]);
          shuffle(joined[odd], joined[2 + odd], Fours<kLanes, 1>{}, kAll,
                  rows[4 * (2 + odd) + column]);
        }
      }
    }
  }
}

// Copies so few adjacent numbers that a call of memcpy would take longer than the copy.
FASTQT_INLINE void copy_line(const float* from, int64_t size, float* to) {
  constexpr int64_t kLanes = 8;
  using Vector = Floats<kLanes>::Vector;
  const auto copy = [&](int64_t at) {
    Vector numbers;
    std::memcpy(&numbers, from + at, sizeof(Vector));
    std::memcpy(to + at, &numbers, sizeof(Vector));
  };
  if (size < kLanes) {
    for (int64_t i = 0; i < size; ++i) to[i] = from[i];
    return;
  }
  for (int64_t i = 0; i + kLanes <= size; i += kLanes) copy(i);
  if (size % kLanes != 0) copy(size - kLanes);  // some of which were copied before
}

// Reads a vector that moves into a panel as it is, or with `kRounded` makes it of twice as many
// floats, rounded in pairs.
template <bool kRounded, class Vector>
FASTQT_INLINE void read_pairs(const std::byte* from, Vector& to) {
  std::memcpy(&to, from, sizeof(Vector));
#ifdef FASTQT_PANELS_ASSEMBLY
  if constexpr (kRounded) {
    Vector high;
    std::memcpy(&high, from + sizeof(Vector), sizeof(Vector));
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(to) : "v"(to), "v"(high));
  }
#endif
}

// Writes `count` columns, at most kLanes, of kLanes rows of a matrix, whose column k is kStep k
// bytes after rows[i], to a panel from `to` on, whose columns are `width` apart.
template <int kLanes, bool kRounded, bool kWhole>
FASTQT_INLINE void pack_block(const std::byte* const (&rows)[kLanes], int64_t k, int64_t count,
                              std::byte* to, int64_t width) {
  using Vector = typename Floats<kLanes>::Vector;
  constexpr int64_t kBytes = sizeof(float), kStep = kBytes * (kRounded ? 2 : 1);
  Vector block[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (kWhole) {
      constexpr int64_t kAhead = 128;  // bytes of a row, in two lines of the cache
      __builtin_prefetch(rows[i] + k * kStep + kAhead);
      read_pairs<kRounded>(rows[i] + k * kStep, block[i]);
    } else {
      std::byte line[kLanes * kStep] = {};
      std::memcpy(line, rows[i] + k * kStep, count * kStep);
      read_pairs<kRounded>(line, block[i]);
    }
  }
  transpose<kLanes>(block);

  if constexpr (kWhole) {
#pragma GCC unroll 16
    for (int column = 0; column < kLanes; ++column)
      std::memcpy(to + column * width * kBytes, &block[column], sizeof(Vector));
  } else {
    for (int64_t column = 0; column < count; ++column)
      std::memcpy(to + column * width * kBytes, &block[column], sizeof(Vector));
  }
}

// The upper half of a number that is rounded to bfloat16, in its place; a NaN stays one.
FASTQT_INLINE uint32_t rounded_upper_half(uint32_t bits) {
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return (is_nan ? bits | 0x00400000u : bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
}

// Two numbers of bfloat16 as an element of a panel, the first in the lower half.
FASTQT_INLINE uint32_t pair(uint16_t first, uint16_t second) {
  return first | static_cast<uint32_t>(second) << 16;
}
FASTQT_INLINE uint32_t pair(float first, float second) {
  return rounded_upper_half(std::bit_cast<uint32_t>(first)) >> 16 |
         rounded_upper_half(std::bit_cast<uint32_t>(second));
}

// Writes a panel from rows whose columns are adjacent: `first_row` and those after it, `row_bytes`
// apart. A column has as many bytes as an element of the panel, or with `kRounded` two floats,
// which become a pair. What of the panel has no row is written too, with any numbers.
template <int kLanes, bool kRounded>
FASTQT_INLINE void pack_rows(const void* first_row, int64_t row_bytes, int64_t rows, int64_t depth,
                             void* panel, int64_t width) {
  constexpr int64_t kBytes = sizeof(float), kStep = kBytes * (kRounded ? 2 : 1);
  const auto* const from = static_cast<const std::byte*>(first_row);
  auto* const to = static_cast<std::byte*>(panel);

  // The last vector of a column may reach beyond it, into columns after it. So columns are written
  // in order, and of all vectors those that reach beyond their column first. The last columns,
  // after which there may be nothing, are copied.
  const int64_t groups = (width + kLanes - 1) / kLanes, beyond = groups * kLanes - width;
  const int64_t reaches = std::max<int64_t>(0, depth - (beyond + width - 1) / width);
  const std::byte* group_rows[kLanes];
  for (int64_t group = groups; group-- > 0;) {
    const int64_t first = group * kLanes;
    for (int i = 0; i < kLanes; ++i)
      group_rows[i] = from + std::min(first + i, rows - 1) * row_bytes;

    const auto at = [&](int64_t k) { return to + (k * width + first) * kBytes; };
    int64_t k = 0;
    for (; k + kLanes <= reaches; k += kLanes)
      pack_block<kLanes, kRounded, true>(group_rows, k, kLanes, at(k), width);
    if (k < reaches) pack_block<kLanes, kRounded, false>(group_rows, k, reaches - k, at(k), width);

    for (k = reaches; k < depth; ++k) {
      for (int64_t i = 0; i < kLanes && first + i < width; ++i) {
        float numbers[2];
        std::memcpy(numbers, group_rows[i] + k * kStep, kStep);
        const uint32_t element =
            kRounded ? pair(numbers[0], numbers[1]) : std::bit_cast<uint32_t>(numbers[0]);
        std::memcpy(at(k) + i * kBytes, &element, kBytes);
      }
    }
  }
}

// Writes `rows` rows of a matrix and `depth` of its columns to a panel of `width` >= rows: panel[k
// * width + i] is the number in row i and column k, and 0 for further i.
template <int kLanes>
FASTQT_INLINE void pack_panel(const Strided& from, int64_t rows, int64_t depth, float* panel,
                              int64_t width) {
  if (from.column_stride == 1 && from.row_stride != 1) {
    const int64_t row_bytes = from.row_stride * static_cast<int64_t>(sizeof(float));
    pack_rows<kLanes, false>(from.data, row_bytes, rows, depth, panel, width);
  } else {
    for (int64_t k = 0; k < depth; ++k) {
      const float* const column = from.at(0, k);
      float* const to = panel + k * width;
      if (from.row_stride == 1) {
        __builtin_prefetch(column + 8 * from.column_stride);
        copy_line(column, rows, to);
      } else {
        for (int64_t i = 0; i < rows; ++i) to[i] = column[i * from.row_stride];
      }
    }
  }
  if (rows < width)
    for (int64_t k = 0; k < depth; ++k)
      std::fill(panel + k * width + rows, panel + (k + 1) * width, 0.0f);
}

// Writes pairs of adjacent numbers in two lines of floats, which are rounded, or of bfloat16. The
// lines are as short as those that `copy_line` copies.
template <class Number>
FASTQT_INLINE void pair_lines(const Number* first, const Number* second, int64_t size,
                              uint32_t* to) {
  constexpr int64_t kLanes = 8;
  typedef Number Numbers __attribute__((vector_size(kLanes * sizeof(Number))));
  typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  typedef uint32_t Pairs __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  const auto read = [](const Number* from,
                       Pairs& to) {  // vectors in what is returned would depend on the level
    Numbers numbers;
    std::memcpy(&numbers, from, sizeof(Numbers));
    Halves halves;
#ifdef FASTQT_PANELS_ASSEMBLY
    if constexpr (std::is_same_v<Number, float>)
      asm("vcvtneps2bf16 %1, %0" : "=v"(halves) : "v"(numbers));
    else
#endif
      std::memcpy(&halves, &numbers, sizeof(Halves));
    to = __builtin_convertvector(halves, Pairs);
  };
  const auto join = [&](int64_t at) {
    Pairs low, high;
    read(first + at, low);
    read(second + at, high);
    const Pairs pairs = low | high << 16;
    std::memcpy(to + at, &pairs, sizeof(Pairs));
  };

  if (size < kLanes) {
    for (int64_t i = 0; i < size; ++i) to[i] = pair(first[i], second[i]);
    return;
  }
  for (int64_t i = 0; i + kLanes <= size; i += kLanes) join(i);
  if (size % kLanes != 0) join(size - kLanes);  // some of which were joined before
}

// The same panel in pairs, of floats or of numbers of bfloat16: panel[k * width + i] has the
// numbers of columns 2 k and 2 k + 1, the second of which is 0 beyond the last column.
template <int kLanes, class Number>
FASTQT_INLINE void pack_pairs(const Strided& from, int64_t rows, int64_t depth, uint32_t* panel,
                              int64_t width) {
  constexpr bool kRounded = std::is_same_v<Number, float>;
  const int64_t pairs = depth / 2;
  if (from.column_stride == 1 && from.row_stride != 1) {
    // The numbers of a pair lie together in memory.
    const int64_t row_bytes = from.row_stride * static_cast<int64_t>(sizeof(Number));
    pack_rows<kLanes, kRounded>(from.data, row_bytes, rows, pairs, panel, width);
  } else {
    for (int64_t k = 0; k < pairs; ++k) {
      const Number *first = from.at<Number>(0, 2 * k), *second = from.at<Number>(0, 2 * k + 1);
      uint32_t* const to = panel + k * width;
      if (from.row_stride == 1) {
        __builtin_prefetch(first + 8 * from.column_stride);
        __builtin_prefetch(second + 8 * from.column_stride);
        pair_lines(first, second, rows, to);
      } else {
        for (int64_t i = 0; i < rows; ++i)
          to[i] = pair(first[i * from.row_stride], second[i * from.row_stride]);
      }
    }
  }

  if (depth % 2 != 0)
    for (int64_t i = 0; i < rows; ++i)
      panel[pairs * width + i] = pair(*from.at<Number>(i, depth - 1), Number(0));
  if (rows < width)
    for (int64_t k = 0; k < (depth + 1) / 2; ++k)
      std::fill(panel + k * width + rows, panel + (k + 1) * width, 0u);
}

template <int kLanes>
FASTQT_INLINE void pack_panel(const Strided& from, int64_t rows, int64_t depth, uint32_t* panel,
                              int64_t width) {
  if (from.is_bfloat16) pack_pairs<kLanes, uint16_t>(from, rows, depth, panel, width);
  else pack_pairs<kLanes, float>(from, rows, depth, panel, width);
}

#endif

}  // namespace fastqt
