// Products of float32 and of bfloat16 matrices by fastqt's own micro-kernel (micro_kernel.h), on
// one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/micro_kernel.h"

namespace fastqt {

// The levels of vector instructions, and tiles, that there are micro-kernels for. Of one processor
// family, the later is the faster. The last two multiply operands in bfloat16, to which they round
// those in float32.
enum class Vectors : int64_t {
  kNone = 0,
  kNeon = 1,
  kAvx2 = 2,
  kAvx512 = 3,
  kAvx512Bfloat16 = 4,
  kAmx = 5
};

constexpr bool multiplies_bfloat16(Vectors level) {
  return level == Vectors::kAvx512Bfloat16 || level == Vectors::kAmx;
}

// The fastest that this processor has, and that this compiler could make, for operands as they are.
Vectors best_vectors();

bool has_bfloat16_vectors();

// Whether this process may use the tiles of AMX.
bool has_tiles();

// out (rows, columns): factor * a b, added to it or written. Only a level that
// `multiplies_bfloat16` has operands or results in bfloat16. All sums are in float32, and a result
// in bfloat16 is rounded once; nothing is added to such a one.
struct PanelProduct {
  Rows out;
  Strided a, b;
  int64_t rows, columns, depth;
  float factor;
  bool add;
  const std::byte* packed_b =
      nullptr;  // what `pack_columns` has made of all columns of b, if it has
  int64_t first_column = 0, all_columns = 0;  // of these columns in packed_b

  // The same of some of the rows and columns of `out`.
  PanelProduct part(int64_t row, int64_t row_end, int64_t column, int64_t column_end) const;
};

// How many columns a panel of b has: parts of a product with packed columns begin at multiples of
// it.
int64_t panel_columns(Vectors level);

// The bytes of all panels of b (depth, columns), and these panels, for products that have b in
// common.
int64_t packed_bytes(int64_t depth, int64_t columns, Vectors level);
void pack_columns(const Strided& b, int64_t depth, int64_t columns, std::byte* packed,
                  Vectors level);

// Writes a product. The level is one that this processor has, and not kNone.
void multiply_panels(const PanelProduct& product, Vectors level);

}  // namespace fastqt
