// Elementary functions that the compiler can vectorise inside `#pragma omp simd` loops, and
// FASTQT_CLONES, which compiles a function once for each x86 level and lets the loader choose. A
// NaN gives a NaN, and an infinity the limit of the function.
//
// fp32: exp_ is within 1.5 ulp, also where its result is subnormal; tanh_, sigmoid_ and log1p_unit_
// are within 3 ulp. A result of sigmoid_ below the least normal number is wrong by less than that
// number. The polynomials are Chebyshev interpolants of the functions that are named beside them.
// fp64: the functions of the C library.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// A build that defines FASTQT_CLONES as nothing gets one version, that of its -march. Sanitized
// builds need that, because the loader chooses a version before the sanitizer has started. arm64
// needs no clones: each has NEON.
#if defined(FASTQT_CLONES)
#elif !defined(__x86_64__) || !defined(__gnu_linux__)
#define FASTQT_CLONES
#elif defined(__clang__) ? __clang_major__ >= 19 : defined(__GNUC__) && __GNUC__ >= 12
#define FASTQT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__GNUC__) && !defined(__clang__)
// GCC before 12 does not know the levels. What it knows as avx2 has no fused multiply-add.
#define FASTQT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FASTQT_CLONES
#endif

// A clone vectorises only code that is inlined into it. FASTQT_INLINE is for functions;
// FASTQT_ALWAYS_INLINE follows the parameters of a lambda, for which Microsoft's compiler has no
// word that all its versions know.
#if defined(__GNUC__) || defined(__clang__)
#define FASTQT_ALWAYS_INLINE __attribute__((always_inline))
#define FASTQT_INLINE inline FASTQT_ALWAYS_INLINE
#elif defined(_MSC_VER)
#define FASTQT_ALWAYS_INLINE
#define FASTQT_INLINE __forceinline
#else
#define FASTQT_ALWAYS_INLINE
#define FASTQT_INLINE inline
#endif

namespace fastqt {

// 2^n for integers -126 <= n <= 127. n is unsigned because callers also compute it for numbers
// whose result they then discard, and an overflow of signed integers is undefined.
FASTQT_INLINE float power_of_two(uint32_t n) { return std::bit_cast<float>((n + 127u) << 23); }

// exp(x) = y * 2^exponent with y in [1/sqrt(2), sqrt(2)]
struct ScaledExp {
  float y;
  uint32_t exponent;  // in two's complement; the low 9 bits are right for every x
};

FASTQT_INLINE ScaledExp scaled_exp(float x) {
  // Adding 1.5 * 2^23 rounds to an integer, and leaves it in the low bits of the sum.
  const float shifted = x * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
  // (exp(r) - 1 - r) / r^2 on |r| <= log(2) / 2
  const float p =
      (((1.3926927e-3f * r + 8.3637739e-3f) * r + 4.16665501e-2f) * r + 1.666657338e-1f) * r + 0.5f;
  return {(p * r) * r + r + 1.0f,
          std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(12582912.0f)};
}

FASTQT_INLINE float exp_(float x) {
  // Beyond these bounds the result is 0 or infinity. A NaN stays: both comparisons are false for
  // it.
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const auto [y, exponent] = scaled_exp(x);
  // The power is applied as two factors, because 2^128 and 2^-149 are not normal numbers.
  const auto half = static_cast<uint32_t>(static_cast<int32_t>(exponent) >> 1);
  return y * power_of_two(half) * power_of_two(exponent - half);
}

// exp(x) for x <= 88, with 0 in place of subnormal results. It costs half as much as exp_.
FASTQT_INLINE float exp_normal_(float x) {
  const auto [y, exponent] = scaled_exp(x);
  // A product, and not a sum of bits, which would make numbers of some NaNs.
  const float e = y * power_of_two(exponent);
  return x < -87.0f ? 0.0f : e;
}

FASTQT_INLINE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

FASTQT_INLINE float tanh_(float x) {
  const float u = x * x;
  // (tanh(x) / x - 1) / x^2 in u = x^2 on |x| <= 0.625, where 1 - 2 / (e + 1) would cancel
  const float p = (((-6.09671e-3f * u + 2.099718e-2f) * u - 5.385091e-2f) * u + 1.333277e-1f) * u -
                  3.3333329e-1f;
  const float near_zero = (p * u) * x + x;
  const float magnitude = std::fabs(x);
  const float far = std::copysign(1.0f - 2.0f / (exp_(2.0f * magnitude) + 1.0f), x);
  return magnitude < 0.625f ? near_zero : far;
}

// log(1 + x) for 0 <= x <= 1, as 2 atanh(x / (2 + x))
FASTQT_INLINE float log1p_unit_(float x) {
  const float z = x / (2.0f + x);
  const float u = z * z;
  // atanh(z) / z in u = z^2 on z <= 1/3
  const float p =
      (((1.4078889e-1f * u + 1.3982579e-1f) * u + 2.0012298e-1f) * u + 3.3333161e-1f) * u;
  return 2.0f * (z + z * p);
}

FASTQT_INLINE double exp_(double x) { return std::exp(x); }

FASTQT_INLINE double exp_normal_(double x) { return std::exp(x); }

FASTQT_INLINE double sigmoid_(double x) { return 1.0 / (1.0 + std::exp(-x)); }

FASTQT_INLINE double log1p_unit_(double x) { return std::log1p(x); }

FASTQT_INLINE double tanh_(double x) { return std::tanh(x); }

// Replaces a subnormal number by 0, as exp_normal_ does: arithmetic on them, in the passes over a
// row and in the matrix products that read the row next, is a hundred times slower than on zeros.
template <class T>
FASTQT_INLINE T without_subnormals(T x) {
  return std::abs(x) < std::numeric_limits<T>::min() ? T(0) : x;
}

}  // namespace fastqt
