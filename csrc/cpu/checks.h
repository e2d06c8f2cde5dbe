// Checks of the arguments of an operator. Operators read raw pointers, so an argument of another
// dtype, shape or layout would be read out of bounds. Each failed check names the argument, what
// was wanted and what came.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "cpu/dtypes.h"

namespace fastqt {

using torch::stable::Tensor;

constexpr int64_t kAnySize = -1;  // in a shape: at least 1

enum class Layout { kStrided, kContiguous };

// What came, for the end of an error: "a contiguous float32 tensor of shape (2, 3)".
std::string described(const Tensor& tensor);

// The tensor is on the CPU and has this dtype, shape and layout.
void check_tensor(const char* name, const Tensor& tensor, ScalarType dtype,
                  std::initializer_list<int64_t> shape, Layout layout);

// The same where there is a tensor.
inline void check_tensor(const char* name, const std::optional<Tensor>& tensor, ScalarType dtype,
                         std::initializer_list<int64_t> shape, Layout layout) {
  if (tensor) check_tensor(name, *tensor, dtype, shape, layout);
}

// The matrix of the queries, from which other arguments take their dtype: float32, float64 or for
// some operators bfloat16. It is not empty.
void check_queries(const Tensor& queries, bool may_be_bfloat16);

// `scores` are whole rows of scores, or none: contiguous, and at most `rows`.
void check_kept_scores(const std::optional<Tensor>& scores, ScalarType dtype, int64_t rows,
                       int64_t width);

// A tile has at least one row and one column: with none, a walk over tiles would not end.
void check_tile(int64_t rows, int64_t columns);

}  // namespace fastqt
