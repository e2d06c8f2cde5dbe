// The one-launch kernel executed on a CPU, as the bindings for Python call it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/small_problem.h"
#include "cuda/tiling.h"

namespace fastqt::host {

// `arithmetic` is float32, tf32, bfloat16 or float16 in all of these.

// Runs the kernel on a problem whose workspace is not laid out. Its tiles are chosen if it has none
// (0 splits). Returns what went wrong, empty if nothing did.
std::string run(cuda::SmallProblem problem, const std::string& arithmetic, int blocks,
                uint64_t seed);

// The tiles that are chosen for a problem and a number of blocks.
cuda::Tiles chosen_tiles(const cuda::SmallProblem& problem, const std::string& arithmetic,
                         int blocks);

cuda::TileCosts tile_costs(const std::string& arithmetic);
int shared_bytes(const std::string& arithmetic);

// Of the m16 tiles and n8 tiles of a matrix in `down` x `across` tiles: the tile of an index, and
// then the share of each of its warps.
std::vector<cuda::Area> areas(int index, int m16_tiles, int down, int n8_tiles, int across);

}  // namespace fastqt::host
