// The tile registers of AMX: eight tiles of 16 rows of 64 bytes, and products of them in bfloat16.
//
// The tests have another file of this name (tests/csrc/cpu/tile_model/cpu/tiles.h), whose tiles are
// arrays, so that what is written for tiles runs on every processor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FASTQT_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastqt {

#ifdef FASTQT_TILES

// Tiles of this thread, as long as the object lives. Another library may have configured tiles of
// its own, and finds them configured again afterwards, though their contents are lost.
class Tiles {
 public:
  // Whether this process may use tiles. Linux gives a process the memory in which their contents
  // are saved when it asks for them, and may refuse.
  static bool available() {
    static const bool allowed = [] {
      constexpr int64_t kAskForState = 0x1023,
                        kTileData = 18;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("amx-tile") &&
             __builtin_cpu_supports("amx-bf16") &&
             syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
    }();
    return allowed;
  }

  Tiles() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    Configuration whole{.palette = 1};
    for (int tile = 0; tile < kTiles; ++tile) whole.row_bytes[tile] = 64, whole.rows[tile] = 16;
    asm volatile("ldtilecfg %0" : : "m"(whole));
  }
  ~Tiles() { asm volatile("ldtilecfg %0" : : "m"(before_)); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int kTile>
  static void clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }

  // Reads or writes 16 rows of 64 bytes, which are `stride` bytes apart.
  template <int kTile>
  static void read(const void* rows, int64_t stride) {
    asm volatile("tileloadd (%1, %2, 1), %%tmm%c0"
                 :
                 : "i"(kTile), "r"(rows), "r"(stride)
                 : "memory");
  }
  template <int kTile>
  static void write(void* rows, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1, %2, 1)"
                 :
                 : "i"(kTile), "r"(rows), "r"(stride)
                 : "memory");
  }

  // Adds a b to a tile of 16 x 16 floats. A row of a has 32 numbers of bfloat16. A row of b has two
  // numbers for each of 16 columns, of two rows of the matrix.
  template <int kSums, int kA, int kB>
  static void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
  }

 private:
  static constexpr int kTiles = 8;

  // As the processor reads it.
  struct alignas(64) Configuration {
    uint8_t palette, start_row;
    std::array<uint8_t, 14> reserved;
    std::array<uint16_t, 16> row_bytes;
    std::array<uint8_t, 16> rows;
  };
  static_assert(sizeof(Configuration) == 64);

  Configuration before_;
};

#endif

}  // namespace fastqt
