// The dtypes that embeddings have, and those that a loss of them is computed in.
#pragma once

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>

namespace fastqt {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;

template <class S>
inline constexpr bool kHas16Bits = sizeof(S) == 2;

// Scores and dS of S are rounded to S in memory. All else is computed in this.
template <class S>
using Computed = std::conditional_t<kHas16Bits<S>, float, S>;

inline bool has_16_bits(ScalarType dtype) { return dtype == ScalarType::BFloat16 || dtype == ScalarType::Half; }

// The dtype of losses, biases and dense targets for embeddings of `dtype`.
inline ScalarType computed_dtype(ScalarType dtype) { return has_16_bits(dtype) ? ScalarType::Float : dtype; }

// Calls visit(S{}) with the dtype for S.
template <class F>
auto with_dtype(ScalarType dtype, const F& visit) {
  switch (dtype) {
    case ScalarType::BFloat16: return visit(BFloat16{});
    case ScalarType::Half: return visit(Half{});
    case ScalarType::Double: return visit(double{});
    default: return visit(float{});
  }
}

}  // namespace fastqt
