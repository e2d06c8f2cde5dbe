// Calls of the operators that csrc/cpu registers, as torch makes them, and what must hold of their
// results.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "source.h"

namespace fuzz {

using Stack = std::vector<c10::IValue>;

// How many inputs an operator has accepted, told when the process ends.
struct Accepted {
  ~Accepted() { std::fprintf(stderr, "accepted: %ld\n", count); }
  long count = 0;
};
inline Accepted accepted;

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "finding: %s\n", what.c_str());
  std::abort();
}

inline void require(bool held, const char* what) {
  if (!held) fail(what);
}

// The results of an operator, or none where it refuses its arguments.
inline std::optional<Stack> call(const char* name, Stack stack, bool must_accept) {
  const std::string full = std::string("fastqt::") + name;
  const c10::OperatorHandle handle =
      c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), "");
  // The dispatcher reads as many arguments as the operator has, whatever the size of the stack.
  require(stack.size() == handle.schema().arguments().size(),
          "another number of arguments than the operator has");
  try {
    handle.callBoxed(stack);
  } catch (const std::exception& error) {
    if (must_accept) fail(full + " refuses a valid input: " + error.what());
    // The errors of this library name the argument, what is wanted and what came.
    return std::nullopt;
  }
  ++accepted.count;
  return stack;
}

inline c10::IValue optional(const std::optional<Tensor>& tensor) {
  return tensor ? c10::IValue(*tensor) : c10::IValue();
}

inline c10::IValue optional(std::optional<int64_t> number) {
  return number ? c10::IValue(*number) : c10::IValue();
}

inline void require_finite(const Tensor& x, const char* what) {
  require(at::isfinite(x).all().item<bool>(), what);
}

// a and b are equal up to the rounding errors of sums of few terms of order 1 in `dtype`.
inline void require_close(const Tensor& a, const Tensor& b, at::ScalarType dtype,
                          const char* what) {
  if (a.numel() == 0) return;
  // In bfloat16 two orders of a sum may round a score of 50 to numbers that are 0.25 apart.
  const double tolerance = dtype == at::kBFloat16 ? 0.5 : dtype == at::kFloat ? 1e-3 : 1e-9;
  const double largest = b.abs().max().item<double>(),
               difference = (a - b).abs().max().item<double>();
  require(difference <= tolerance * (1 + largest), what);
}

}  // namespace fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  at::set_num_threads(1);
  return 0;
}
