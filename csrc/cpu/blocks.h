// What a walk over the score matrix reads and writes: embeddings, their gradients, and the blocks
// of columns.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "cpu/matrix.h"
#include "cpu/norms.h"

namespace fastqt {

struct Embeddings {
  const Tensor& queries;
  const Tensor& candidates;
  const std::optional<Tensor>& negatives;
  const std::optional<Tensor>& row_negatives;
};

// Columns of the score matrix. All rows share the candidates and the negatives. The row negatives
// are one column, in which each row has an embedding of its own.
template <class S>
struct Block {
  Tensor embeddings;
  std::optional<Tensor> gradient;
  Range columns;
  bool is_row_negatives;
  std::optional<UnitRows<S>> unit;  // the embeddings again, where they count at norm 1
  std::optional<Tensor> sum;  // of rounded products, in float32: the gradient without the factor s
};

}  // namespace fastqt
