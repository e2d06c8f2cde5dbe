// bfloat16, the upper half of a float32. The conversions are here, which the compiler can
// vectorise: they round to the nearest number, and of two such to the even one. All arithmetic is
// that of float32.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/vector_math.h"

namespace fastqt {

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;

  FASTQT_INLINE explicit BFloat16(float x) {
    const auto from = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (from + 0x7fffu + ((from >> 16) & 1u)) >> 16;
    bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
  }

  FASTQT_INLINE operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

}  // namespace fastqt
