// fastqt's own products of float32 and bfloat16 tensors, on all threads.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>

#include "cpu/panel_product.h"

namespace fastqt {

using torch::stable::Tensor;

// The level of the own products that are used here, or kNone where torch's are.
Vectors own_products();

// The same for operands of the dtype of a tensor, which may be bfloat16.
Vectors own_products_of(const Tensor& operand);

// The level for operands in bfloat16, or rounded to it; kNone where this processor has no
// instructions for them, or multiplies float32 faster.
Vectors own_bfloat16_products();

Strided strided(const Tensor& matrix);

// out = beta * out + alpha * a b, where this returns true. It returns false where it does not know
// the dtype of the tensors, the layout of `out` or beta. `packed_b` is what `pack_columns` has made
// of b at this level, if it has.
bool own_multiply(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha,
                  Vectors level, const std::byte* packed_b = nullptr);

// A new matrix for scores and what becomes of them. Rows that are a multiple of half a page apart
// share few sets of a cache, which does not hold the rows or a column of a tile: a few columns that
// nobody uses then lie between them. Own products read and write rows that are any number of
// columns apart.
Tensor new_workspace(const Tensor& like, int64_t rows, int64_t columns);

}  // namespace fastqt
