// How products are shared out: tiles of strips of 16 rows and eights of columns, and their parts for warps.
// Plain C++: the operator chooses, the kernel follows.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/small_problem.h"

namespace fastqt::cuda {

constexpr int kStrip = 16, kEight = 8;
constexpr int kHalves = 2, kQuarters = 4;  // of a tile's strips, of its eights: a warp has one of each
static_assert(kHalves * kQuarters == kWarps);

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Where the part of an index begins, of nearly equal parts: the longest has ceil_div(total, parts).
constexpr int part_start(int total, int parts, int index) { return total * index / parts; }

struct Area {
  int strip, strips, eight, eights;  // the first ones and how many

  constexpr int row() const { return kStrip * strip; }
  constexpr int rows() const { return kStrip * strips; }
  constexpr int column() const { return kEight * eight; }
  constexpr int columns() const { return kEight * eights; }
};

// Of strips x eights in `down` x `across` tiles, that of an index.
constexpr Area tile_at(int index, int strips, int down, int eights, int across) {
  const int i = index % down, j = index / down;
  const int strip = part_start(strips, down, i), eight = part_start(eights, across, j);
  return {strip, part_start(strips, down, i + 1) - strip, eight, part_start(eights, across, j + 1) - eight};
}

// A warp's part of a tile, counted from the tile's corner. Warps w and w + 4 use the same quarter of a
// multiprocessor: the one's longer share of the eights goes with the other's shorter one.
constexpr Area warp_share(const Area& tile, int warp) {
  const int half = warp / kQuarters, quarter = (warp + half) % kQuarters;
  const int upper = ceil_div(tile.strips, kHalves), eight = part_start(tile.eights, kQuarters, quarter);
  return {half * upper, half == 0 ? upper : tile.strips - upper, eight,
          part_start(tile.eights, kQuarters, quarter + 1) - eight};
}

// What a tile of an arithmetic may have at most, and what it takes.
struct TileCosts {
  int strips, eights;
  int element_bytes;
  double clocks;  // of a quarter of a multiprocessor for a product 16 x 8 x 16
};
constexpr TileCosts kHalfCosts{10, 28, 2, 6.5}, kTf32Costs{8, 16, 4, 13}, kFloatCosts{8, 16, 4, 64};

// Of an H100, near enough for a choice: bytes a clock from the L2 cache, for all blocks and for one, and to and
// from a block's shared memory; and clocks until a tile's first operands are there.
constexpr double kAllBytes = 4100, kBlockBytes = 64, kSharedBytes = 128, kFillClocks = 1700;

// What the tensor cores and the shared memory of a block do for a tile, a step of 1 of the depth.
struct TileWork {
  int products;  // 16 x 8, of the busiest quarter of the multiprocessor
  int elements;  // into shared memory, and from there into each warp's registers
};
constexpr TileWork tile_work(int strips, int eights) {
  int products[kQuarters] = {}, elements = kStrip * strips + kEight * eights;
  for (int warp = 0; warp < kWarps; ++warp) {
    const Area share = warp_share({0, strips, 0, eights}, warp);
    if (share.strips == 0 || share.eights == 0) continue;
    products[warp % kQuarters] += share.strips * share.eights;
    elements += share.rows() + ceil_div(share.eights, 2) * 2 * kEight;
  }
  return {*std::max_element(products, products + kQuarters), elements};
}

// Clocks of `waves` tiles of the given size one after another, while all blocks read `bytes`.
inline double tile_clocks(const TileCosts& costs, int waves, int strips, int eights, double depth, double bytes) {
  const TileWork work = tile_work(strips, eights);
  const double own = costs.element_bytes * depth * (kStrip * strips + kEight * eights) / kBlockBytes;
  const double shared = costs.element_bytes * depth * work.elements / kSharedBytes;
  const double products = work.products * depth / 16 * costs.clocks;
  return waves * kFillClocks + std::max(bytes / kAllBytes, waves * std::max({own, shared, products}));
}

// The scores' inner dimension is split so that more blocks have a tile; but parts are written and read again.
inline void choose_score_tiles(Tiles& tiles, const SmallProblem& p, const TileCosts& costs, int blocks) {
  const int strips = ceil_div(p.N, kStrip), eights = ceil_div(p.M, kEight), steps = ceil_div(p.D, kTileDepth);
  const int least_down = ceil_div(strips, costs.strips), least_across = ceil_div(eights, costs.eights);
  double least = std::numeric_limits<double>::infinity();
  for (int down = least_down; down <= std::min(strips, least_down + 3); ++down)
    for (int across = least_across; across <= std::min(eights, least_across + 3); ++across) {
      const int most = std::clamp(blocks / (down * across), 1, std::min(kMostSplits, ceil_div(steps, 2)));
      for (int splits = 1; splits <= most; ++splits) {
        const int waves = ceil_div(down * across * splits, blocks);
        const double parts = 4.0 * splits * p.N * padded_columns(p.M);
        const double operands = 1.0 * costs.element_bytes * p.D * (p.N * across + p.M * down);
        const double depth = ceil_div(steps, splits) * kTileDepth;
        const double clocks = parts / kAllBytes + tile_clocks(costs, waves, ceil_div(strips, down),
                                                              ceil_div(eights, across), depth, operands + parts);
        if (clocks >= least) continue;
        least = clocks;
        tiles.splits = splits, tiles.score_down = down, tiles.score_across = across;
      }
    }
}

inline void choose_gradient_tiles(Tiles& tiles, const SmallProblem& p, const TileCosts& costs, int blocks) {
  const int query_strips = p.dqueries != nullptr ? ceil_div(p.N, kStrip) : 0;
  const int candidate_strips = p.dcandidates != nullptr ? ceil_div(p.M, kStrip) : 0;
  const int eights = ceil_div(p.D, kEight);
  const int tallest = std::min(costs.strips, std::max(query_strips, candidate_strips));
  const int widest = std::min(costs.eights, eights);
  double least = std::numeric_limits<double>::infinity();
  for (int height = tallest; height >= std::max(1, tallest - 6); --height)
    for (int width = widest; width >= std::max(1, widest - 24); --width) {
      const int query_down = ceil_div(query_strips, height), candidate_down = ceil_div(candidate_strips, height);
      const int across = ceil_div(eights, width), sides = (query_strips > 0) + (candidate_strips > 0);
      const double coefficients = 1.0 * p.N * p.M * across * sides;
      const double inputs = 1.0 * p.D * (query_down * p.M + candidate_down * p.N);
      const double depth = query_strips == 0 ? p.N : candidate_strips == 0 ? p.M : std::max(p.N, p.M);
      const double clocks = tile_clocks(costs, ceil_div((query_down + candidate_down) * across, blocks), height,
                                        ceil_div(eights, across), depth, costs.element_bytes * (coefficients + inputs));
      if (clocks >= least) continue;
      least = clocks;
      tiles.query_down = query_down, tiles.candidate_down = candidate_down, tiles.gradient_across = across;
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
