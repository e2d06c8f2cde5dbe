// The dtypes that embeddings have, and those that a loss of them is computed in.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <type_traits>

#include "cpu/bfloat16.h"

namespace fastqt {

using torch::headeronly::ScalarType;

// Whether scores, and results of matrix products, are rounded to S in memory and computed with in
// another dtype.
template <class S>
inline constexpr bool kRounds = std::is_same_v<S, BFloat16>;

template <class S>
using Computed = std::conditional_t<kRounds<S>, float, S>;

// The dtype of losses, biases and dense targets for embeddings of `dtype`.
inline ScalarType computed_dtype(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 ? ScalarType::Float : dtype;
}

// Calls visit(S{}) with the dtype for S.
template <class F>
auto with_dtype(ScalarType dtype, const F& visit) {
  switch (dtype) {
    case ScalarType::BFloat16: return visit(BFloat16{});
    case ScalarType::Double: return visit(double{});
    default: return visit(float{});
  }
}

}  // namespace fastqt
