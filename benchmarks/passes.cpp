// Prints for each of the main vectorised passes of csrc/cpu how many nanoseconds it takes for a
// number, as the least of many times on a row that fits the first cache.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "cpu/gru_rows.h"
#include "cpu/row_passes.h"

namespace {

constexpr int64_t kLength = 2048;
volatile double sink;  // so that no result is unused

template <class F>
void report(const char* name, const std::vector<float>& row, const F& pass) {
  std::vector<float> x(row.size());
  double least = std::numeric_limits<double>::infinity();
  for (int turn = 0; turn < 1000; ++turn) {
    std::copy(row.begin(), row.end(), x.begin());
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 4; ++i) pass(x.data());
    least = std::min(
        least,
        std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count());
  }
  std::printf("%s %.5f\n", name, least / (4 * kLength));
}

}  // namespace

int main() {
  std::mt19937 generator(0);
  std::normal_distribution<float> distribution(0, 4);
  std::vector<float> row(kLength), other(kLength), gates(3 * kLength), biases(4 * kLength),
      state(kLength);
  for (auto* values : {&row, &other, &gates, &biases})
    std::generate(values->begin(), values->end(), [&] { return distribution(generator); });
  const std::vector<float> wide = gates;
  std::vector<float> next(kLength), hidden(kLength);

  using namespace fastqt;
  report("row_max", row, [](float* x) { sink = row_max(x, kLength); });
  report("row_dot", row, [&](float* x) { sink = row_dot(x, other.data(), kLength); });
  report("row_exp_sum", row, [](float* x) { sink = row_exp_sum(x, kLength, 16); });
  report("row_exp", row, [](float* x) { sink = row_exp(x, kLength, 16); });
  report("row_affine", row, [](float* x) { row_affine(x, kLength, -1, 0.5f); });
  report("row_sigmoid", row, [](float* x) { sink = row_sigmoid(x, kLength, 8, 4); });
  report("row_two_exps", row,
         [&](float* x) { row_two_exps(x, kLength, 16, 1, other.data(), other.data()); });
  report("gru_reset_after_row", gates, [&](float* x) {
    gru_reset_after_row(x, wide.data(), biases.data(), state.data(), hidden.data(), next.data(),
                        kLength);
  });
}
