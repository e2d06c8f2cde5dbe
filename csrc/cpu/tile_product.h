// The innermost part of a product in bfloat16 on AMX, whose tiles take the place of the vectors of
// micro_kernel.h: four tiles of sums, 32 rows and 32 columns, are added to by two tiles of a and
// two of b, each of which is read once for two products.
//
// A panel of b is that of micro_kernel.h, whose 16 rows of pairs are a tile as they are. A panel of
// a has the tiles of 16 rows one after the other, and those of the next 16 rows behind them. What
// of a panel has no pair is 0. A row that there is not has any numbers, and sums that nobody reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/micro_kernel.h"
#include "cpu/panel_packing.h"
#include "cpu/tiles.h"

namespace fastqt {

#if defined(FASTQT_TILES) && defined(FASTQT_PANELS_ASSEMBLY)
#define FASTQT_TILE_PRODUCTS 1

struct TilesShape {
  using Element = uint32_t;
  static constexpr int kLanes = 16, kRows = 32, kVectors = 2;
  static constexpr int kColumns = kLanes * kVectors;
  static constexpr bool kPairs = true;
  // Rows and elements of a panel of a come in whole tiles.
  static constexpr int64_t kRowUnit = 16, kUnit = 16;
  // The panels of a in a block, 1 MB, and the panel of b at hand, 64 kB, stay in the second level
  // of the cache. By calculation: no processor with tiles has timed it yet.
  static constexpr int64_t kBlockRows = 512, kBlockElements = 512;

  static constexpr int64_t elements(int64_t depth) { return (depth + 31) / 32 * kUnit; }
};

// Writes the tiles of at most 16 rows of a matrix with adjacent columns.
template <bool kRounded>
FASTQT_INLINE void pack_tiles_of_rows(const Strided& from, int64_t rows, int64_t depth,
                                      uint32_t* to) {
  using Vector = Floats<16>::Vector;
  constexpr int64_t kNumbers = 32, kBytes = kRounded ? 4 : 2;
  for (int64_t i = 0; i < rows; ++i) {
    const auto* const row = static_cast<const std::byte*>(from.data) + i * from.row_stride * kBytes;
    Vector pairs;
    for (int64_t k = 0; k < depth; k += kNumbers) {
      uint32_t* const line = to + k / kNumbers * 256 + i * 16;
      if (k + kNumbers <= depth) {
        read_pairs<kRounded>(row + k * kBytes, pairs);
      } else {
        std::byte rest[kNumbers * kBytes] = {};
        std::memcpy(rest, row + k * kBytes, (depth - k) * kBytes);
        read_pairs<kRounded>(rest, pairs);
      }
      std::memcpy(line, &pairs, sizeof(Vector));
    }
  }
}

// The same of a matrix whose rows are adjacent, or neither: pairs of its columns, transposed.
template <class Number>
FASTQT_INLINE void pack_tiles_of_columns(const Strided& from, int64_t rows, int64_t depth,
                                         uint32_t* to) {
  using Vector = Floats<16>::Vector;
  for (int64_t k = 0; k < depth; k += 32) {
    uint32_t pairs[16][16] = {};
    const int64_t numbers = std::min<int64_t>(32, depth - k);
    pack_pairs<16, Number>(from.from(0, k), rows, numbers, &pairs[0][0], 16);
    Vector lines[16];
    std::memcpy(lines, pairs, sizeof(lines));
    transpose<16>(lines);
    std::memcpy(to + k / 32 * 256, lines, sizeof(lines));
  }
}

// Packs at most 32 rows of a; those after the first 16 are written `group` elements behind them.
FASTQT_INLINE void pack_tiles(const Strided& a, int64_t rows, int64_t depth, int64_t group,
                              uint32_t* to) {
  for (int64_t i = 0; i < rows; i += 16, to += group) {
    const int64_t height = std::min<int64_t>(16, rows - i);
    const Strided from = a.from(i, 0);
    if (a.column_stride != 1 || a.row_stride == 1) {
      if (a.is_bfloat16) pack_tiles_of_columns<uint16_t>(from, height, depth, to);
      else pack_tiles_of_columns<float>(from, height, depth, to);
      continue;
    }
    if (a.is_bfloat16) pack_tiles_of_rows<false>(from, height, depth, to);
    else pack_tiles_of_rows<true>(from, height, depth, to);
  }
}

// Adds the products of `steps` tiles of each of kGroups groups of rows and kVectors vectors of
// columns, and writes the sums, (16 kGroups, 16 kVectors).
template <int kGroups, int kVectors>
FASTQT_INLINE void add_tiles(int64_t steps, const uint32_t* a, int64_t group, const uint32_t* b,
                             float* sums) {
  constexpr int kTile = 256, kRowBytes = 64;
  Tiles::clear<0>(), Tiles::clear<1>(), Tiles::clear<2>(), Tiles::clear<3>();
  for (int64_t step = 0; step < steps; ++step, a += kTile, b += kTile * kVectors) {
    Tiles::read<6>(b, kRowBytes * kVectors);
    Tiles::read<4>(a, kRowBytes);
    Tiles::add_product<0, 4, 6>();
    if constexpr (kVectors == 2) {
      Tiles::read<7>(b + 16, kRowBytes * kVectors);
      Tiles::add_product<1, 4, 7>();
    }
    if constexpr (kGroups == 2) {
      Tiles::read<5>(a + group, kRowBytes);
      Tiles::add_product<2, 5, 6>();
      if constexpr (kVectors == 2) Tiles::add_product<3, 5, 7>();
    }
  }
  constexpr int kLine = 16 * kVectors;
  Tiles::write<0>(sums, kRowBytes * kVectors);
  if constexpr (kVectors == 2) Tiles::write<1>(sums + 16, kRowBytes * kVectors);
  if constexpr (kGroups == 2) {
    Tiles::write<2>(sums + 16 * kLine, kRowBytes * kVectors);
    if constexpr (kVectors == 2) Tiles::write<3>(sums + 16 * kLine + 16, kRowBytes * kVectors);
  }
}

// to = factor * a b, or from + factor * a b, for `rows` rows of a panel of a, a panel of kVectors
// vectors, and `elements` pairs: as `tile_product` of micro_kernel.h.
template <int kVectors>
FASTQT_INLINE void tiles_product(int64_t elements, const uint32_t* a, int64_t rows,
                                 const uint32_t* b, const float& factor, const Rows* from,
                                 const Rows& to) {
  using Vector = Floats<16>::Vector;
  constexpr int kLine = 16 * kVectors, kStepsInARow = kSteps / TilesShape::kUnit;
  const int64_t steps = elements / TilesShape::kUnit, group = elements * 16;
  const int64_t blocks = std::max<int64_t>(1, (steps + kStepsInARow - 1) / kStepsInARow);
  alignas(64) float totals[32 * kLine], sums[32 * kLine];

  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = steps * block / blocks, count = steps * (block + 1) / blocks - first;
    float* const written = block == 0 ? totals : sums;
    const uint32_t *of_a = a + first * 256, *of_b = b + first * 256 * kVectors;
    if (rows > 16) add_tiles<2, kVectors>(count, of_a, group, of_b, written);
    else add_tiles<1, kVectors>(count, of_a, group, of_b, written);
    if (block == 0) continue;
    for (int64_t at = 0; at < rows * kLine; at += 16) {
      Vector total, sum;
      std::memcpy(&total, totals + at, sizeof(Vector));
      std::memcpy(&sum, sums + at, sizeof(Vector));
      total += sum;
      std::memcpy(totals + at, &total, sizeof(Vector));
    }
  }

  for (int64_t i = 0; i < rows; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      Vector result;
      std::memcpy(&result, totals + i * kLine + v * 16, sizeof(Vector));
      result *= factor;
      if (from != nullptr) {
        Vector before;
        std::memcpy(&before, from->at<float>(i, v * 16), sizeof(Vector));
        result += before;
      }
      if (to.is_bfloat16) round_to(result, to.at<uint16_t>(i, v * 16));
      else std::memcpy(to.at<float>(i, v * 16), &result, sizeof(Vector));
    }
  }
}

#endif

}  // namespace fastqt
