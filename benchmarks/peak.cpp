// Prints how many operations a second the multipliers of this processor make on some threads at
// once, in GFLOP/s: of float32, and of bfloat16 with sums in float32, 0 where it has no
// instructions for them. Vectors stay in registers; the tiles of AMX are read again from the first
// level of the cache for every second product, as a product of matrices reads them.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/tiles.h"

namespace {

constexpr int kChains = 24;  // of additions that do not wait for each other
constexpr int64_t kSteps = 2'000'000;
constexpr int kTurns = 48;  // a quarter of a second: an interruption may last for several

template <int kBytes>
struct Registers {
  typedef float Vector __attribute__((vector_size(kBytes)));
};

// Each multiplies and adds vectors that stay in registers. The empty assembly keeps the compiler
// from leaving out what nobody reads.
#define FASTQT_PEAK(NAME, TARGET, BYTES, CHAINS, STEP)                                         \
  TARGET __attribute__((noinline)) void NAME() {                                               \
    using Vector = Registers<BYTES>::Vector;                                                   \
    Vector sums[CHAINS] = {};                                                                  \
    Vector x = {}, y = {};                                                                     \
    asm volatile("" : "+v"(x), "+v"(y));                                                       \
    for (int64_t step = 0; step < kSteps; ++step) {                                            \
      _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; ++i) {                              \
        Vector sum = sums[i];                                                                  \
        STEP;                                                                                  \
        sums[i] = sum;                                                                         \
      }                                                                                        \
    }                                                                                          \
    _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; ++i) asm volatile("" ::"v"(sums[i])); \
  }

#ifdef __x86_64__
FASTQT_PEAK(with_avx512, __attribute__((target("avx512f,fma"))), 64, kChains,
            asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y)))
FASTQT_PEAK(with_bfloat16, __attribute__((target("avx512f,fma"))), 64, kChains,
            asm volatile("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y)))
FASTQT_PEAK(with_avx2, __attribute__((target("avx2,fma"))), 32, 12,
            asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y)))
#endif

#ifdef FASTQT_TILES
void with_tiles() {
  constexpr int kTile = 512;  // numbers of bfloat16
  const fastqt::Tiles tiles;
  alignas(64) uint16_t operands[8 * kTile];
  std::fill_n(operands, 8 * kTile, uint16_t{0x3f80});  // 1
  for (int64_t step = 0; step < kSteps; ++step) {
    const uint16_t* const at = operands + step % 2 * 4 * kTile;
    fastqt::Tiles::read<4>(at, 64), fastqt::Tiles::read<6>(at + kTile, 64);
    fastqt::Tiles::add_product<0, 4, 6>();
    fastqt::Tiles::read<7>(at + 2 * kTile, 64);
    fastqt::Tiles::add_product<1, 4, 7>();
    fastqt::Tiles::read<5>(at + 3 * kTile, 64);
    fastqt::Tiles::add_product<2, 5, 6>(), fastqt::Tiles::add_product<3, 5, 7>();
  }
}
#endif

// GFLOP/s of `threads` threads that run a function at once, whose steps have so many operations:
// the best of some turns.
double rate(void (*function)(), double operations, int threads) {
  double least = 1e30;
  std::barrier together(threads);
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t)
    others.emplace_back([&] {
      for (int turn = 0; turn < kTurns; ++turn) {
        together.arrive_and_wait();
        function();
        together.arrive_and_wait();
      }
    });
  for (int turn = 0; turn < kTurns; ++turn) {
    together.arrive_and_wait();
    const auto begin = std::chrono::steady_clock::now();
    function();
    together.arrive_and_wait();
    least = std::min(
        least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  for (std::thread& thread : others) thread.join();
  return operations * kSteps * threads / least / 1e9;
}

}  // namespace

int main(int, char** arguments) {
  const int threads = std::atoi(arguments[1]);
  double float32 = 0, bfloat16 = 0;
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) float32 = rate(with_avx512, kChains * 32, threads);
  else if (__builtin_cpu_supports("avx2")) float32 = rate(with_avx2, 12 * 16, threads);
#ifdef FASTQT_TILES
  constexpr double kOperations = 4.0 * 2 * 16 * 16 * 32;
  if (fastqt::Tiles::available()) bfloat16 = rate(with_tiles, kOperations, threads);
#endif
  if (bfloat16 == 0 && __builtin_cpu_supports("avx512bf16"))
    bfloat16 = rate(with_bfloat16, kChains * 64, threads);
#else
  static_cast<void>(threads);
#endif
  std::printf("%.1f %.1f\n", float32, bfloat16);
}
