// What the bytes of an input stand for: sizes, flags, numbers and tensors.
//
// The memory of a tensor ends with its last element, so that AddressSanitizer sees each access
// beyond it.
#pragma once

#include <ATen/ATen.h>
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

namespace fuzz {

using at::Tensor;

class Source {
 public:
  Source(const uint8_t* data, std::size_t size) : bytes_(data, size) {
    tame = bytes_.ConsumeBool();
    random_.seed(bytes_.ConsumeIntegral<uint32_t>());
  }

  // A tame input is a problem that an operator must accept and whose results must be finite. Others
  // may be anything.
  bool tame;

  int64_t between(int64_t least, int64_t most) {
    return bytes_.ConsumeIntegralInRange<int64_t>(least, most);
  }
  bool flag() { return bytes_.ConsumeBool(); }
  // True for about one in 32 inputs that are not tame.
  bool wild() { return !tame && between(0, 31) == 31; }

  int64_t size(int64_t most) { return flag() ? between(1, 4) : between(1, most); }

  int64_t any_integer() {
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max(),
                      kLeast = std::numeric_limits<int64_t>::min();
    constexpr int64_t kSpecial[] = {
        0, -1, 1, -100, kMost, kLeast, kMost - 1, int64_t{1} << 32, int64_t{1} << 61};
    return flag() ? kSpecial[between(0, 8)] : between(-8, 64);
  }

  // A finite number of order 1 where the input is tame.
  double number() {
    if (tame) return uniform(-2, 2);
    constexpr double kMost = std::numeric_limits<double>::max(),
                     kInfinity = std::numeric_limits<double>::infinity(),
                     kNaN = std::numeric_limits<double>::quiet_NaN();
    constexpr double kSpecial[] = {0,      -0.0,  1,     -1,   kInfinity, -kInfinity, kNaN,   kMost,
                                   -kMost, 1e308, 5e307, 1e39, 1e-46,     1e-309,     5e-324, 1e30};
    return flag() ? kSpecial[between(0, 15)] : uniform(-4, 4);
  }

  double uniform(double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(random_);
  }

  at::ScalarType dtype() { return flag() ? at::kFloat : at::kDouble; }

  // Now and then another dtype.
  at::ScalarType dtype_like(at::ScalarType wanted) {
    constexpr at::ScalarType kOthers[] = {at::kFloat,    at::kDouble, at::kHalf,
                                          at::kBFloat16, at::kLong,   at::kInt,
                                          at::kBool,     at::kByte,   at::kComplexFloat};
    return wild() ? kOthers[between(0, 8)] : wanted;
  }

  // Now and then other sizes.
  std::vector<int64_t> sizes_like(std::vector<int64_t> wanted) {
    if (!wild()) return wanted;
    const int64_t change = between(0, 3);
    if (change == 0) return {};
    if (change == 1) wanted.push_back(1);
    if (change == 2 && !wanted.empty())
      wanted[between(0, static_cast<int64_t>(wanted.size()) - 1)] = between(0, 3);
    if (change == 3 && !wanted.empty()) wanted.pop_back();
    return wanted;
  }

  // A tensor of any layout, filled with numbers. Most weights are not negative, and all of a tame
  // input's.
  Tensor tensor(std::vector<int64_t> sizes, at::ScalarType dtype, bool weights = false) {
    return laid_out(filled(sizes_like(std::move(sizes)), dtype_like(dtype), weights));
  }

  // The same, which is contiguous where the input is tame.
  Tensor contiguous(std::vector<int64_t> sizes, at::ScalarType dtype, bool weights = false) {
    Tensor made = filled(sizes_like(std::move(sizes)), dtype_like(dtype), weights);
    return wild() ? laid_out(made) : made;
  }

  // True for one cell in four.
  Tensor mask(std::vector<int64_t> sizes) {
    return laid_out(
        filled(sizes_like(std::move(sizes)), at::kDouble, false).gt(1).to(dtype_like(at::kBool)));
  }

  // Integers that `next` gives.
  template <class F>
  Tensor integers(std::vector<int64_t> sizes, const F& next) {
    Tensor made = at::empty(sizes_like(std::move(sizes)), at::kLong);
    int64_t* const to = made.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < made.numel(); ++i) to[i] = next(i);
    made = made.to(dtype_like(at::kLong));
    return wild() ? laid_out(made) : made;
  }

 private:
  Tensor filled(const std::vector<int64_t>& sizes, at::ScalarType dtype, bool weights) {
    Tensor made = at::empty(sizes, at::kDouble);
    double* const to = made.mutable_data_ptr<double>();
    // Few numbers come from the bytes, so that inputs can be short.
    const int64_t chosen = tame ? 0 : between(0, 4);
    for (int64_t i = 0; i < made.numel(); ++i) to[i] = uniform(weights ? 0 : -2, 2);
    for (int64_t k = 0; k < chosen && made.numel() > 0; ++k)
      to[between(0, made.numel() - 1)] = number();
    return made.to(dtype);
  }

  Tensor laid_out(const Tensor& x) {
    switch (between(0, 4)) {
      case 1: return x.dim() == 2 ? x.t().contiguous().t() : x;
      case 2: return x.dim() > 0 ? at::stack({x, x}, -1).select(-1, 1) : x;
      case 3: return x.dim() > 0 && x.size(0) > 0 ? x.narrow(0, 0, 1).expand(x.sizes()) : x;
      case 4: return x.dim() > 0 ? at::cat({x, x}).narrow(0, x.size(0), x.size(0)) : x;
      default: return x;
    }
  }

  FuzzedDataProvider bytes_;
  std::mt19937_64 random_;
};

}  // namespace fuzz
