// Replaces csrc/cuda/device.h on a CPU: the operations of a GPU that the kernels use, carried out
// lane by lane.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cuda/small_problem.h"
#include "fibres.h"

#define FASTQT_KERNEL(threads) void
#define FASTQT_ARGUMENT const
#define FASTQT_DEVICE inline
#define FASTQT_UNROLL
#define FASTQT_UNROLL_BY(times)

namespace fastqt::cuda {

using host::grid;
using std::max;
using std::min;

inline int thread_index() { return grid->self->thread; }
inline int block_index() { return grid->self->block; }
inline int block_count() { return grid->blocks; }
inline unsigned char* shared_memory() { return grid->shared_memory(); }

struct Nothing {};
inline void sync_warp() {
  grid->together<Nothing, Nothing>("sync_warp", {}, [](const Nothing* const*, Nothing* const*) {});
}
inline void sync_block() { grid->sync_block(); }
using GridToken = int;
inline GridToken arrive_at_grid() { return grid->arrive_at_grid(); }
inline void await_grid(GridToken token) { grid->await_grid(token); }

template <class X>
X shuffle_xor(X x, int lanes) {
  return grid->together<X, X>("shuffle_xor", x, [&](const X* const* in, X* const* out) {
    for (int lane = 0; lane < 32; ++lane) *out[lane] = *in[lane ^ lanes];
  });
}

inline uint32_t ballot(bool yes) {
  return grid->together<bool, uint32_t>("ballot", yes,
                                        [](const bool* const* in, uint32_t* const* out) {
                                          uint32_t votes = 0;
                                          for (int lane = 0; lane < 32; ++lane)
                                            votes |= uint32_t{*in[lane]} << lane;
                                          for (int lane = 0; lane < 32; ++lane) *out[lane] = votes;
                                        });
}

inline void require(bool holds, const char* what) {
  if (!holds) grid->fail(what);
}

inline void carry_out(const host::Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.bytes);
  std::memset(static_cast<char*>(copy.to) + copy.bytes, 0, 16 - copy.bytes);
}

// An asynchronous copy takes place at once or when it is awaited, at random: the kernel may count
// on neither.
inline void cp_async_16B(void* to, const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    grid->fail("cp_async_16B: want addresses that are multiples of 16");
  const host::Copy copy{to, from, bytes, grid->self->groups};
  grid->coin() ? carry_out(copy) : grid->self->copies.push_back(copy);
}
inline void commit_copies() { ++grid->self->groups; }

template <int kPending>
void await_copies() {
  auto& copies = grid->self->copies;
  const auto due = [](const host::Copy& copy) {
    return copy.group < grid->self->groups - kPending;
  };
  for (const host::Copy& copy : copies)
    if (due(copy)) carry_out(copy);
  copies.erase(std::remove_if(copies.begin(), copies.end(), due), copies.end());
}

struct Four32 {
  uint32_t at[4];
};

inline void load_matrices(uint32_t (&out)[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    grid->fail("load_matrices: want addresses that are multiples of 16");
  const auto compute = [=](const void* const* const* rows, Four32* const* out) {
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        uint32_t pair = 0;
        for (int k = 0; k < 2; ++k) {
          const int i = lane / 4, j = lane % 4 * 2 + k;
          const int from = 8 * matrix + (transposed ? j : i);
          pair |= uint32_t{static_cast<const uint16_t*>(*rows[from])[transposed ? i : j]} << 16 * k;
        }
        out[lane]->at[matrix] = pair;
      }
  };
  const auto result =
      grid->together<const void*, Four32>(transposed ? "ldmatrix.trans" : "ldmatrix", row, compute);
  std::memcpy(out, result.at, sizeof out);
}
inline void load_matrices(uint32_t (&out)[4], const void* row) { load_matrices(out, row, false); }
inline void load_matrices_transposed(uint32_t (&out)[4], const void* row) {
  load_matrices(out, row, true);
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float rounded_product(float a, float b) { return a * b; }

// The bits of x rounded to the nearest number whose lowest `count` bits are 0; ties go to even, or
// away from 0.
inline uint32_t without_bits(float x, int count, bool ties_to_even) {
  const uint32_t bits = bits_of(x);
  if (std::isnan(x)) return bits | 0x400000u;
  if (std::isinf(x)) return bits;
  const uint32_t half = 1u << (count - 1);
  return (bits + (ties_to_even ? half - 1 + (bits >> count & 1) : half)) & ~((1u << count) - 1);
}

inline uint32_t to_tf32(float x) { return without_bits(x, 13, false); }

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return from_bits(uint32_t{x.bits} << 16); }
inline float to_float(float16 x) {
  _Float16 half;
  std::memcpy(&half, &x, 2);
  return static_cast<float>(half);
}

template <class T>
T rounded_to(float x);
template <>
inline float rounded_to<float>(float x) {
  return x;
}
template <>
inline bfloat16 rounded_to<bfloat16>(float x) {
  return {static_cast<uint16_t>(without_bits(x, 16, true) >> 16)};
}
template <>
inline float16 rounded_to<float16>(float x) {
  const auto half = static_cast<_Float16>(x);
  float16 out;
  std::memcpy(&out, &half, 2);
  return out;
}

// The elements that a lane holds of a product on tensor cores.
struct Fragments {
  float sum[4];
  uint32_t a[4], b[2];
};

// sum (16, 8) += a (16, kDepth) b (kDepth, 8): `a_at(in, row, depth)` and `b_at(in, depth, column)`
// find elements.
template <int kDepth, class A, class B>
void multiply_fragments(const char* name, float (&sum)[4], const uint32_t (&a)[4],
                        const uint32_t (&b)[2], const A& a_at, const B& b_at) {
  Fragments own;
  std::memcpy(own.sum, sum, sizeof sum);
  std::memcpy(own.a, a, sizeof a);
  std::memcpy(own.b, b, sizeof b);
  struct Result {
    float sum[4];
  };
  const auto result = grid->together<Fragments, Result>(
      name, own, [&](const Fragments* const* in, Result* const* out) {
        float a_matrix[16][kDepth], b_matrix[kDepth][8];
        for (int k = 0; k < kDepth; ++k) {
          for (int i = 0; i < 16; ++i) a_matrix[i][k] = a_at(in, i, k);
          for (int j = 0; j < 8; ++j) b_matrix[k][j] = b_at(in, k, j);
        }
        for (int lane = 0; lane < 32; ++lane)
          for (int n = 0; n < 4; ++n) {
            const int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
            float total = in[lane]->sum[n];
            for (int k = 0; k < kDepth; ++k) total += a_matrix[row][k] * b_matrix[k][column];
            out[lane]->sum[n] = total;
          }
      });
  std::memcpy(sum, result.sum, sizeof sum);
}

template <class T>
float half_of(uint32_t pair, int k) {
  return to_float(T{static_cast<uint16_t>(pair >> 16 * k)});
}

template <class T>
void multiply_add(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T) {
  multiply_fragments<16>(
      std::is_same_v<T, bfloat16> ? "mma bf16" : "mma f16", sum, a, b,
      [](const Fragments* const* in, int i, int k) {
        return half_of<T>(in[i % 8 * 4 + k % 8 / 2]->a[i / 8 + k / 8 * 2], k % 2);
      },
      [](const Fragments* const* in, int k, int j) {
        return half_of<T>(in[j * 4 + k % 8 / 2]->b[k / 8], k % 2);
      });
}

inline void multiply_add_tf32(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  // Tensor cores ignore the bits of a float32 that tf32 does not have.
  const auto value = [](uint32_t bits) { return from_bits(bits & ~0x1fffu); };
  multiply_fragments<8>(
      "mma tf32", sum, a, b,
      [&](const Fragments* const* in, int i, int k) {
        return value(in[i % 8 * 4 + k % 4]->a[i / 8 + k / 4 * 2]);
      },
      [&](const Fragments* const* in, int k, int j) { return value(in[j * 4 + k % 4]->b[k / 4]); });
}

}  // namespace fastqt::cuda
