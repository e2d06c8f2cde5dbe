// What the kernels ask of a GPU: indices, barriers, shuffles, copies that run ahead, tensor cores.
//
// The tests have a header of the same name and contents for a CPU, so that kernels contain none of
// CUDA's own words.
#pragma once

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cassert>
#include <cstdint>

#include "cuda/small_problem.h"

#define FASTQT_KERNEL(threads) __global__ void __launch_bounds__(threads, 1)
#define FASTQT_ARGUMENT const __grid_constant__
#define FASTQT_DEVICE __device__ __forceinline__
#define FASTQT_UNROLL _Pragma("unroll")
#define FASTQT_UNROLL_BY(times) _Pragma(FASTQT_QUOTED(unroll times))
#define FASTQT_QUOTED(text) #text

namespace fastqt::cuda {

FASTQT_DEVICE int thread_index() { return threadIdx.x; }
FASTQT_DEVICE int block_index() { return blockIdx.x; }
FASTQT_DEVICE int block_count() { return gridDim.x; }

FASTQT_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char bytes[];
  return bytes;
}

FASTQT_DEVICE void sync_warp() { __syncwarp(); }
FASTQT_DEVICE void sync_block() { __syncthreads(); }
// A barrier of the grid in two parts, between which a thread may do what needs nothing from other
// blocks.
using GridToken = cooperative_groups::grid_group::arrival_token;
FASTQT_DEVICE GridToken arrive_at_grid() {
  return cooperative_groups::this_grid().barrier_arrive();
}
FASTQT_DEVICE void await_grid(GridToken token) {
  cooperative_groups::this_grid().barrier_wait(static_cast<GridToken&&>(token));
}

template <class X>
FASTQT_DEVICE X shuffle_xor(X x, int lanes) {
  return __shfl_xor_sync(0xffffffffu, x, lanes);
}
FASTQT_DEVICE uint32_t ballot(bool yes) { return __ballot_sync(0xffffffffu, yes); }

// Ends the launch with an error, as a failed device assertion does.
FASTQT_DEVICE void require(bool holds, const char* what) {
  if (!holds) __assert_fail(what, __FILE__, __LINE__, "fastqt");
}

FASTQT_DEVICE uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Copies 16 bytes, of which those beyond the first `bytes` become 0 and are not read.
FASTQT_DEVICE void cp_async_16B(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}
FASTQT_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's copies but those of the last `kPending` commits.
template <int kPending>
FASTQT_DEVICE void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lanes 8 m .. 8 m + 7 give the rows of matrix m. A lane
// gets the elements (lane / 4, 2 (lane % 4)) and the next, of each matrix or of its transpose.
FASTQT_DEVICE void load_matrices(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}
FASTQT_DEVICE void load_matrices_transposed(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// sum (16, 8) += a b, with a (16, 16) and b (16, 8) of 16-bit elements. Lane 4 g + t has of `sum`
// the elements (g, 2 t), (g, 2 t + 1) and those of row g + 8; of `a` the pairs (g, 2 t), (g + 8, 2
// t), (g, 2 t + 8), (g + 8, 2 t + 8); of `b` the pairs of rows 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 in
// column g.
#define FASTQT_MULTIPLY_ADD(TYPE)                                            \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
FASTQT_DEVICE void multiply_add(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                bfloat16) {
  FASTQT_MULTIPLY_ADD("bf16");
}
FASTQT_DEVICE void multiply_add(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                float16) {
  FASTQT_MULTIPLY_ADD("f16");
}
#undef FASTQT_MULTIPLY_ADD

// The same with a (16, 8) and b (8, 8) of tf32: of `a` the elements (g, t), (g + 8, t), (g, t + 4),
// (g + 8, t + 4), of `b` (t, g) and (t + 4, g).
FASTQT_DEVICE void multiply_add_tf32(float (&sum)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
FASTQT_DEVICE uint32_t to_tf32(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}
// a b by itself, never part of a fused operation, so that a score is the same number wherever it is
// used.
FASTQT_DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }

FASTQT_DEVICE float from_bits(uint32_t bits) { return __uint_as_float(bits); }

FASTQT_DEVICE float to_float(float x) { return x; }
FASTQT_DEVICE float to_float(bfloat16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }
FASTQT_DEVICE float to_float(float16 x) { return __half2float(__ushort_as_half(x.bits)); }

template <class T>
FASTQT_DEVICE T rounded_to(float x);
template <>
FASTQT_DEVICE float rounded_to<float>(float x) {
  return x;
}
template <>
FASTQT_DEVICE bfloat16 rounded_to<bfloat16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
FASTQT_DEVICE float16 rounded_to<float16>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}

}  // namespace fastqt::cuda
