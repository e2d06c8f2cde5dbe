// How products are shared out: a block's tile consists of m16 tiles (16 rows) by n8 tiles (8
// columns), which are what one mma.sync instruction adds to; each warp has a part of them. Plain
// C++: the operator chooses, the kernel follows.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/small_problem.h"

namespace fastqt::cuda {

constexpr int kM16 = 16, kN8 = 8;
constexpr int kHalves = 2,
              kQuarters = 4;  // of a tile's m16 tiles, of its n8 tiles: a warp has one of each
static_assert(kHalves * kQuarters == kWarps);

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Where the part of an index begins, of nearly equal parts: the longest has ceil_div(total, parts).
constexpr int part_start(int total, int parts, int index) { return total * index / parts; }

struct Area {
  int m16_tile, m16_tiles, n8_tile, n8_tiles;  // the first ones and how many

  constexpr int row() const { return kM16 * m16_tile; }
  constexpr int rows() const { return kM16 * m16_tiles; }
  constexpr int column() const { return kN8 * n8_tile; }
  constexpr int columns() const { return kN8 * n8_tiles; }
};

// Of m16 tiles x n8 tiles in `down` x `across` tiles, that of an index.
constexpr Area tile_at(int index, int m16_tiles, int down, int n8_tiles, int across) {
  const int i = index % down, j = index / down;
  const int m16_tile = part_start(m16_tiles, down, i), n8_tile = part_start(n8_tiles, across, j);
  return {m16_tile, part_start(m16_tiles, down, i + 1) - m16_tile, n8_tile,
          part_start(n8_tiles, across, j + 1) - n8_tile};
}

// A warp's part of a tile, counted from the tile's corner. Warps w and w + 4 use the same quarter
// of a multiprocessor: the one's longer share of the n8 tiles goes with the other's shorter one.
constexpr Area warp_share(const Area& tile, int warp) {
  const int half = warp / kQuarters, quarter = (warp + half) % kQuarters;
  const int upper = ceil_div(tile.m16_tiles, kHalves),
            n8_tile = part_start(tile.n8_tiles, kQuarters, quarter);
  return {half * upper, half == 0 ? upper : tile.m16_tiles - upper, n8_tile,
          part_start(tile.n8_tiles, kQuarters, quarter + 1) - n8_tile};
}

// What a tile of an arithmetic may have at most, and what it takes.
struct TileCosts {
  int m16_tiles, n8_tiles;
  int element_bytes;
  double clocks;  // of a quarter of a multiprocessor for a product 16 x 8 x 16
};
constexpr TileCosts kHalfCosts{10, 28, 2, 6.5}, kTf32Costs{8, 16, 4, 13}, kFloatCosts{8, 16, 4, 64};

// Of an H100, near enough for a choice: bytes a clock from the L2 cache, for all blocks and for
// one, and to and from a block's shared memory; and clocks until a tile's first operands are there.
constexpr double kAllBytes = 4100, kBlockBytes = 64, kSharedBytes = 128, kFillClocks = 1700;

// What the tensor cores and the shared memory of a block do for a tile, a step of 1 of the depth.
struct TileWork {
  int products;  // 16 x 8, of the busiest quarter of the multiprocessor
  int elements;  // into shared memory, and from there into each warp's registers
};
constexpr TileWork tile_work(int m16_tiles, int n8_tiles) {
  int products[kQuarters] = {}, elements = kM16 * m16_tiles + kN8 * n8_tiles;
  for (int warp = 0; warp < kWarps; ++warp) {
    const Area share = warp_share({0, m16_tiles, 0, n8_tiles}, warp);
    if (share.m16_tiles == 0 || share.n8_tiles == 0) continue;
    products[warp % kQuarters] += share.m16_tiles * share.n8_tiles;
    elements += share.rows() + ceil_div(share.n8_tiles, 2) * 2 * kN8;
  }
  return {*std::max_element(products, products + kQuarters), elements};
}

// Clocks of `waves` tiles of the given size one after another, while all blocks read `bytes`.
inline double tile_clocks(const TileCosts& costs, int waves, int m16_tiles, int n8_tiles,
                          double depth, double bytes) {
  const TileWork work = tile_work(m16_tiles, n8_tiles);
  const double loads =
      costs.element_bytes * depth * (kM16 * m16_tiles + kN8 * n8_tiles) / kBlockBytes;
  const double shared = costs.element_bytes * depth * work.elements / kSharedBytes;
  const double products = work.products * depth / 16 * costs.clocks;
  return waves * kFillClocks +
         std::max(bytes / kAllBytes, waves * std::max({loads, shared, products}));
}

// The scores' inner dimension is split so that more blocks have a tile; but parts are written and
// read again.
inline void choose_score_tiles(Tiles& tiles, const SmallProblem& p, const TileCosts& costs,
                               int blocks) {
  const int m16_tiles = ceil_div(p.N, kM16), n8_tiles = ceil_div(p.M, kN8),
            steps = ceil_div(p.D, kTileDepth);
  const int least_down = ceil_div(m16_tiles, costs.m16_tiles),
            least_across = ceil_div(n8_tiles, costs.n8_tiles);

  double least = std::numeric_limits<double>::infinity();
  for (int down = least_down; down <= std::min(m16_tiles, least_down + 3); ++down)
    for (int across = least_across; across <= std::min(n8_tiles, least_across + 3); ++across) {
      const int most =
          std::clamp(blocks / (down * across), 1, std::min(kMostSplits, ceil_div(steps, 2)));

      for (int splits = 1; splits <= most; ++splits) {
        const int waves = ceil_div(down * across * splits, blocks);
        const double parts = 4.0 * splits * p.N * padded_columns(p.M);
        const double operands = 1.0 * costs.element_bytes * p.D * (p.N * across + p.M * down);
        const double depth = ceil_div(steps, splits) * kTileDepth;
        const double clocks =
            parts / kAllBytes + tile_clocks(costs, waves, ceil_div(m16_tiles, down),
                                            ceil_div(n8_tiles, across), depth, operands + parts);

        if (clocks >= least) continue;
        least = clocks;
        tiles.splits = splits, tiles.score_down = down, tiles.score_across = across;
      }
    }
}

inline void choose_gradient_tiles(Tiles& tiles, const SmallProblem& p, const TileCosts& costs,
                                  int blocks) {
  const int query_m16_tiles = p.dqueries != nullptr ? ceil_div(p.N, kM16) : 0;
  const int candidate_m16_tiles = p.dcandidates != nullptr ? ceil_div(p.M, kM16) : 0;
  const int n8_tiles = ceil_div(p.D, kN8);
  const int tallest = std::min(costs.m16_tiles, std::max(query_m16_tiles, candidate_m16_tiles));
  const int widest = std::min(costs.n8_tiles, n8_tiles);

  // Tiles close to the largest one are tried: smaller ones would read their operands too often.
  double least = std::numeric_limits<double>::infinity();
  for (int height = tallest; height >= std::max(1, tallest - 6); --height)
    for (int width = widest; width >= std::max(1, widest - 24); --width) {
      const int query_down = ceil_div(query_m16_tiles, height),
                candidate_down = ceil_div(candidate_m16_tiles, height);
      const int across = ceil_div(n8_tiles, width),
                sides = (query_m16_tiles > 0) + (candidate_m16_tiles > 0);

      const double coefficients = 1.0 * p.N * p.M * across * sides;
      const double inputs = 1.0 * p.D * (query_down * p.M + candidate_down * p.N);
      const double depth = query_m16_tiles == 0       ? p.N
                           : candidate_m16_tiles == 0 ? p.M
                                                      : std::max(p.N, p.M);
      const int waves = ceil_div((query_down + candidate_down) * across, blocks);
      const double clocks = tile_clocks(costs, waves, height, ceil_div(n8_tiles, across), depth,
                                        costs.element_bytes * (coefficients + inputs));

      if (clocks >= least) continue;
      least = clocks;
      tiles.query_down = query_down, tiles.candidate_down = candidate_down,
      tiles.gradient_across = across;
    }
}

// Of a problem whose sizes are set, and the places of the gradients that are wanted.
inline Tiles choose_tiles(const SmallProblem& p, const TileCosts& costs, int blocks) {
  Tiles tiles{};
  choose_score_tiles(tiles, p, costs, blocks);
  choose_gradient_tiles(tiles, p, costs, blocks);
  return tiles;
}

}  // namespace fastqt::cuda
