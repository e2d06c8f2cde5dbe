// What the operators of a problem have in common: the gradients that they return, and the arguments
// of a problem.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cpu/matrix.h"
#include "cpu/problem.h"

namespace fastqt {

// An uninitialised tensor for the gradient of an argument.
inline Tensor new_gradient(const char*, double) {
  return new_tensor<0>({}, aoti_torch_dtype_float64());
}

inline Tensor new_gradient(const char*, const Tensor& input) {
  if (input.dim() == 1) return new_tensor<1>({input.size(0)}, dtype_of(input));
  return new_tensor<2>({input.size(0), input.size(1)}, dtype_of(input));
}

inline Tensor new_gradient(const char* name, const std::optional<Tensor>& input) {
  STD_TORCH_CHECK(input, name, ": want a tensor, since its gradient is needed, got None");
  return new_gradient(name, *input);
}

// Tensors for the gradients that are needed.
inline Gradients new_gradients(const Problem& p, const std::vector<bool>& needs) {
#define FASTQT_COUNT(name) +1
  constexpr std::size_t kInputs = FASTQT_INPUTS(FASTQT_COUNT);
#undef FASTQT_COUNT
  STD_TORCH_CHECK(needs.size() == kInputs, "needs: want ", kInputs, " booleans, got ",
                  needs.size());
  Gradients made;
  auto need = needs.begin();
#define FASTQT_MAKE(name) \
  if (*need++) made.name = new_gradient(#name, p.name);
  FASTQT_INPUTS(FASTQT_MAKE)
#undef FASTQT_MAKE
  return made;
}

inline std::vector<Tensor> present(const Gradients& gradients) {
  std::vector<Tensor> tensors;
#define FASTQT_ADD(name) \
  if (gradients.name) tensors.push_back(*gradients.name);
  FASTQT_INPUTS(FASTQT_ADD)
#undef FASTQT_ADD
  return tensors;
}

// The type of an argument as a schema writes it.
template <class T>
inline constexpr const char* kTypeName = nullptr;
template <>
inline constexpr const char* kTypeName<Tensor> = "Tensor ";
template <>
inline constexpr const char* kTypeName<std::optional<Tensor>> = "Tensor? ";
template <>
inline constexpr const char* kTypeName<double> = "float ";
template <>
inline constexpr const char* kTypeName<int64_t> = "int ";
template <>
inline constexpr const char* kTypeName<bool> = "bool ";

// The operators of a problem take it first: kProblem says so in their schemas, and WithProblem
// makes of a function of a Problem and other arguments the one of tensors and numbers that is
// registered.
#define FASTQT_ARGUMENT(type, name) +kTypeName<type> + #name ", "
inline const std::string kProblem = std::string() FASTQT_PROBLEM(FASTQT_ARGUMENT);
#undef FASTQT_ARGUMENT

template <auto function>
struct WithProblem;

template <class Result, class... More, Result (*function)(const Problem&, More...)>
struct WithProblem<function> {
#define FASTQT_PARAMETER(type, name) const type name,
#define FASTQT_NAME(type, name) name,
  static Result call(FASTQT_PROBLEM(FASTQT_PARAMETER) const More... more) {
    const Problem p{FASTQT_PROBLEM(FASTQT_NAME)};
    return function(p, more...);
  }
#undef FASTQT_PARAMETER
#undef FASTQT_NAME
};

}  // namespace fastqt
