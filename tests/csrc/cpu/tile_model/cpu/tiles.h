// A model of the tiles of csrc/cpu/tiles.h: arrays in the place of registers. It stands in their
// place where this folder is searched for headers before csrc.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define FASTQT_TILES 1

namespace fastqt {

class Tiles {
 public:
  static bool available() { return __builtin_cpu_supports("avx512f"); }

  // Tiles that are not configured have no rows, and to use them is an error.
  Tiles() : before_(configured()) {
    configured() = this;
    std::memset(&tiles_, 0xff, sizeof(tiles_));  // what is read before it is written is NaN
  }
  ~Tiles() { configured() = before_; }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int kTile>
  static void clear() {
    tile(kTile) = {};
  }

  template <int kTile>
  static void read(const void* rows, int64_t stride) {
    for (int i = 0; i < 16; ++i)
      std::memcpy(tile(kTile)[i].data(), static_cast<const char*>(rows) + i * stride, 64);
  }

  template <int kTile>
  static void write(void* rows, int64_t stride) {
    for (int i = 0; i < 16; ++i)
      std::memcpy(static_cast<char*>(rows) + i * stride, tile(kTile)[i].data(), 64);
  }

  // Of each pair the first product is added first. The model is optimised in builds with
  // sanitizers too, which look at what reads and writes the memory of others.
  template <int kSums, int kA, int kB>
  __attribute__((optimize("O3"), no_sanitize("address", "undefined"))) static void add_product() {
    static_assert(kSums != kA && kSums != kB && kA != kB);
    Tile &sums = tile(kSums), &a = tile(kA), &b = tile(kB);
    for (int k = 0; k < 16; ++k) {
      float first[16], second[16];
      for (int j = 0; j < 16; ++j) first[j] = number(b[k][j] << 16), second[j] = number(b[k][j]);
      for (int i = 0; i < 16; ++i) {
        const float low = number(a[i][k] << 16), high = number(a[i][k]);
        for (int j = 0; j < 16; ++j) {
          const float sum = std::bit_cast<float>(sums[i][j]) + low * first[j];
          sums[i][j] = std::bit_cast<uint32_t>(sum + high * second[j]);
        }
      }
    }
  }

 private:
  using Tile = std::array<std::array<uint32_t, 16>, 16>;  // 16 rows of 64 bytes

  // The object whose tiles this thread uses. The tiles themselves are not of the thread: a library
  // that is loaded late may have little memory of threads.
  static Tiles*& configured() {
    static thread_local Tiles* current = nullptr;
    return current;
  }
  static Tile& tile(int number) {
    if (configured() == nullptr) std::abort();
    return configured()->tiles_[number];
  }

  // The number of bfloat16 in the upper half. The processor takes one below the smallest normal one
  // for 0.
  static float number(uint32_t bits) {
    return (bits & 0x7f800000u) == 0 ? 0.0f : std::bit_cast<float>(bits & 0xffff0000u);
  }

  Tiles* before_;
  mutable std::array<Tile, 8> tiles_;  // an object that is const has configured them too
};

}  // namespace fastqt
