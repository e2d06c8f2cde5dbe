// Random problems for the tile functions of csrc/cpu, on several threads, in buffers of exactly the
// size needed, so that a sanitizer sees each access beyond their ends. `make sanitize` runs many of
// them.
//
// One tile of whole rows, and two walks over tiles of any size, must give the same loss and the
// same gradient. The program does not need libtorch: threads.cpp has a parallel_for, which always
// uses several threads.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "cpu/clip_tile.h"
#include "cpu/log_sums.h"
#include "cpu/row_passes.h"
#include "cpu/score_tile.h"

namespace fastqt {
namespace {

std::mt19937_64 random_bits(0);

int64_t between(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random_bits);
}
bool chance() { return between(0, 1) == 1; }

// An array of exactly `size` elements on the heap.
template <class T>
struct ExactArray {
  explicit ExactArray(int64_t size) : size(size), data(new T[size]()) {}
  T* get() const { return data.get(); }
  T& operator[](int64_t i) { return data[i]; }
  int64_t size;
  std::unique_ptr<T[]> data;
};

template <class T>
ExactArray<T> normal(int64_t size, double deviation) {
  ExactArray<T> made(size);
  std::normal_distribution<double> distribution(0, deviation);
  for (int64_t i = 0; i < size; ++i) made[i] = static_cast<T>(distribution(random_bits));
  return made;
}

ExactArray<int64_t> groups(int64_t size) {
  ExactArray<int64_t> made(size);
  for (int64_t i = 0; i < size; ++i) made[i] = between(0, 3);
  return made;
}

void require(bool held, const char* what, int64_t problem) {
  if (held) return;
  std::fprintf(stderr, "problem %ld: %s\n", static_cast<long>(problem), what);
  std::exit(1);
}

template <class T>
void expect_close(const ExactArray<T>& a, const ExactArray<T>& b, double tolerance,
                  const char* what, int64_t problem) {
  double largest = 1e-30, difference = 0;
  for (int64_t i = 0; i < a.size; ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(b.get()[i])));
    difference = std::max(difference, std::abs(static_cast<double>(a.get()[i]) - b.get()[i]));
  }
  require(difference <= tolerance * largest, what, problem);
}

// What the scores of rows and columns are multiplied by, or two nulls.
template <class T>
struct Factors {
  const T* rows;
  const T* columns;
};

// Calls visit(tile) for the tiles of a matrix (n, width), which have each of its cells once.
template <class T, class F>
void for_tiles(T* scores, int64_t n, int64_t width, int64_t rows, int64_t columns,
               Factors<T> factors, const F& visit) {
  for (int64_t r = 0; r < n; r += rows)
    for (int64_t c = 0; c < width; c += columns)
      visit(Tile<T>{scores + r * width + c, width, r, std::min(rows, n - r), c,
                    std::min(columns, width - c), factors.rows ? factors.rows + r : nullptr,
                    factors.columns ? factors.columns + c : nullptr});
}

// The inverse norms of rows of any lengths.
template <class T>
ExactArray<T> inverse_norms(int64_t size) {
  ExactArray<T> made(size);
  for (int64_t i = 0; i < size; ++i)
    made[i] = static_cast<T>(std::exp2(static_cast<double>(between(-3, 1))));
  return made;
}

template <class T>
void run(int64_t problem) {
  const int64_t n = between(1, 40), candidates = between(1, 80),
                width = candidates + between(0, 20);
  const double tolerance = sizeof(T) == 8 ? 1e-11 : 2e-4;
  const auto scores = normal<T>(n * width, chance() ? 1 : 30);
  const auto bias = normal<T>(candidates, 1);
  const auto query_groups = groups(n), candidate_groups = groups(candidates);
  ExactArray<int64_t> starts(n + 1), columns(n);
  ExactArray<double> weights(n), background(n), row_weights(n);
  ExactArray<bool> mask(n * candidates);
  const auto diagonal = chance() ? kKeep : chance() ? kZero : kExclude;
  const bool has_background = diagonal != kExclude && chance();
  for (int64_t i = 0; i < n; ++i) {
    starts[i + 1] = i + 1;
    columns[i] = between(0, candidates - 1);
    weights[i] = diagonal != kKeep && columns[i] == i ? 0 : 1;
    background[i] = 0.01;
    row_weights[i] = 1.0 / n;
  }
  for (int64_t i = 0; i < n * candidates; ++i)
    mask[i] = between(0, 9) == 0 && columns[i / candidates] != i % candidates;
  const bool masked = !has_background && chance(), grouped = !has_background && chance();
  const Cells<T> cells{candidates,
                       diagonal,
                       chance() ? bias.get() : nullptr,
                       starts.get(),
                       columns.get(),
                       weights.get(),
                       nullptr,
                       0,
                       0,
                       has_background ? background.get() : nullptr,
                       grouped ? query_groups.get() : nullptr,
                       grouped ? candidate_groups.get() : nullptr,
                       masked ? mask.get() : nullptr,
                       candidates,
                       1};
  const int64_t tile_rows = between(1, n), tile_columns = between(1, width);
  const auto row_factors = inverse_norms<T>(n), column_factors = inverse_norms<T>(width);
  const Factors<T> factors =
      chance() ? Factors<T>{row_factors.get(), column_factors.get()} : Factors<T>{};
  const auto copy = [&] {
    ExactArray<T> made(scores.size);
    std::copy_n(scores.get(), scores.size, made.get());
    return made;
  };
  Report report;

  const auto whole_rows = copy(), first_walk = copy(), second_walk = copy();
  ExactArray<double> logsumexp(n), mass(n), loss(n), tiled_logsumexp(n), tiled_mass(n),
      tiled_loss(n);
  softmax_rows(cells,
               Tile<T>{whole_rows.get(), width, 0, n, 0, width, factors.rows, factors.columns},
               row_weights.get(), RowSums{logsumexp.get(), mass.get(), loss.get()}, report);
  std::fill_n(tiled_logsumexp.get(), n, -INFINITY);
  const RowSums sums{tiled_logsumexp.get(), tiled_mass.get(), tiled_loss.get()};
  for_tiles(first_walk.get(), n, width, tile_rows, tile_columns, factors,
            [&](const Tile<T>& tile) { softmax_tile(cells, tile, sums, report); });
  for_tiles(
      second_walk.get(), n, width, tile_rows, tile_columns, factors, [&](const Tile<T>& tile) {
        softmax_tile_backward(cells, tile, row_weights.get(), sums.logsumexp, sums.mass, report);
      });
  expect_close(tiled_mass, mass, 1e-12, "mass of a softmax in tiles", problem);
  expect_close(tiled_loss, loss, tolerance, "loss of a softmax in tiles", problem);
  expect_close(second_walk, whole_rows, tolerance, "gradient of a softmax in tiles", problem);

  const auto forward = copy(), backward = copy();
  ExactArray<double> sigmoid(n), sigmoid_again(n);
  for_tiles(forward.get(), n, width, n, width, factors,
            [&](const Tile<T>& tile) { sigmoid_tile(cells, tile, sigmoid.get(), report); });
  for_tiles(backward.get(), n, width, tile_rows, tile_columns, factors, [&](const Tile<T>& tile) {
    sigmoid_tile_backward(cells, tile, row_weights.get(), sigmoid_again.get(), report);
  });
  expect_close(sigmoid_again, sigmoid, tolerance, "loss of a sigmoid in tiles", problem);
  require(report.status == kOk, "targets reported", problem);

  // The row passes that the walk makes over embeddings.
  const auto x = normal<T>(width, 1);
  ExactArray<T> y(width);
  row_multiple(y.get(), x.get(), width, T(2), false);
  row_multiple(y.get(), x.get(), width, T(1), true);
  const double square = row_dot(x.get(), x.get(), width), triple = row_dot(x.get(), y.get(), width);
  require(std::abs(triple - 3 * square) <= tolerance * (1 + square), "dot of a multiple", problem);
}

// The gradient of CLIP's loss must be the mean of two: that of a softmax over the rows of the
// scores, and that of one over the rows of the transposed scores. Sizes above 256 have more than
// one stripe of columns (see clip_tile.cpp).
template <class T>
void run_clip(int64_t problem) {
  const int64_t n = chance() ? between(1, 40) : between(250, 300);
  const double tolerance = sizeof(T) == 8 ? 1e-11 : 2e-4;
  const auto scores = normal<T>(n * n, chance() ? 1 : 30);
  ExactArray<T> by_rows(n * n), by_columns(n * n), first_walk(n * n), second_walk(n * n);
  ExactArray<int64_t> starts(n + 1), columns(n);
  ExactArray<double> ones(n), weights(n), logsumexp(n), mass(n), loss(n);
  for (int64_t i = 0; i < n; ++i)
    starts[i + 1] = i + 1, columns[i] = i, ones[i] = 1, weights[i] = (i + 1.0) / n;
  for (int64_t i = 0; i < n * n; ++i) {
    by_rows[i] = first_walk[i] = second_walk[i] = scores.get()[i];
    by_columns[i % n * n + i / n] = scores.get()[i];
  }
  const Cells<T> cells{n, kKeep,   nullptr, starts.get(), columns.get(), ones.get(), nullptr, 0,
                       0, nullptr, nullptr, nullptr,      nullptr,       0,          0};
  const auto row_factors = inverse_norms<T>(n), column_factors = inverse_norms<T>(n);
  const Factors<T> factors =
      chance() ? Factors<T>{row_factors.get(), column_factors.get()} : Factors<T>{};
  Report report;
  softmax_rows(cells, Tile<T>{by_rows.get(), n, 0, n, 0, n, factors.rows, factors.columns},
               weights.get(), RowSums{logsumexp.get(), mass.get(), loss.get()}, report);
  std::fill_n(mass.get(), n, 0.0);  // which the next call adds to
  softmax_rows(cells, Tile<T>{by_columns.get(), n, 0, n, 0, n, factors.columns, factors.rows},
               weights.get(), RowSums{logsumexp.get(), mass.get(), loss.get()}, report);
  for (int64_t i = 0; i < n * n; ++i) by_rows[i] = (by_rows[i] + by_columns[i % n * n + i / n]) / 2;

  ExactArray<double> positive(n), row_others(n), column_others(n);
  std::fill_n(row_others.get(), n, -INFINITY);
  std::fill_n(column_others.get(), n, -INFINITY);
  const PairSums sums{positive.get(), row_others.get(), column_others.get(), n};
  const int64_t tile_rows = between(1, n), tile_columns = between(1, n);
  for_tiles(first_walk.get(), n, n, tile_rows, tile_columns, factors,
            [&](const Tile<T>& tile) { clip_tile(tile, sums); });
  ExactArray<double> halves(n), row_logsumexp(n), column_logsumexp(n), pairs(n);
  for (int64_t i = 0; i < n; ++i) {
    halves[i] = weights[i] / 2;
    row_logsumexp[i] = log_add(row_others[i], positive[i]);
    column_logsumexp[i] = log_add(column_others[i], positive[i]);
    pairs[i] = -halves[i] * (std::exp(row_others[i] - row_logsumexp[i]) +
                             std::exp(column_others[i] - column_logsumexp[i]));
  }
  const Softmax<T> rows(row_logsumexp.get(), halves.get(), n),
      of_columns(column_logsumexp.get(), halves.get(), n);
  for_tiles(second_walk.get(), n, n, tile_rows, tile_columns, factors, [&](const Tile<T>& tile) {
    clip_tile_backward(tile, rows, of_columns, {pairs.get(), n});
  });
  expect_close(second_walk, by_rows, tolerance, "gradient of pairs in tiles", problem);

  // With fewer pairs, the cells of the others are cells as any other: the softmaxes stay what they
  // are.
  const int64_t fewer = between(0, n - 1);
  ExactArray<double> own(fewer), others(n), others_of_columns(n), whole(n), whole_columns(n);
  std::fill_n(others.get(), n, -INFINITY);
  std::fill_n(others_of_columns.get(), n, -INFINITY);
  for (int64_t i = 0; i < n * n; ++i) first_walk[i] = second_walk[i] = scores.get()[i];
  for_tiles(first_walk.get(), n, n, tile_rows, tile_columns, factors, [&](const Tile<T>& tile) {
    clip_tile(tile, PairSums{own.get(), others.get(), others_of_columns.get(), fewer});
  });
  for (int64_t i = 0; i < n; ++i) {
    whole[i] = i < fewer ? log_add(others[i], own[i]) : others[i];
    whole_columns[i] = i < fewer ? log_add(others_of_columns[i], own[i]) : others_of_columns[i];
  }
  expect_close(whole, row_logsumexp, tolerance, "logsumexp of rows of which some have pairs",
               problem);
  expect_close(whole_columns, column_logsumexp, tolerance,
               "logsumexp of columns of which some have pairs", problem);
  for_tiles(second_walk.get(), n, n, tile_rows, tile_columns, factors, [&](const Tile<T>& tile) {
    clip_tile_backward(tile, rows, of_columns, {pairs.get(), fewer});
  });
  for (int64_t i = fewer; i < n; ++i) {
    const T factor = factors.rows == nullptr ? T(1) : factors.rows[i] * factors.columns[i];
    by_rows[i * n + i] += factor * static_cast<T>(weights[i]);
  }
  expect_close(second_walk, by_rows, tolerance, "gradient of cells of which some are pairs",
               problem);
}

// Every thread finds a target outside the candidates; the report is that of the first row that has
// one.
void report_of_bad_targets() {
  const int64_t n = 64;
  const auto scores = normal<float>(n * n, 1);
  ExactArray<int64_t> starts(n + 1), columns(n);
  ExactArray<double> weights(n), row_weights(n), logsumexp(n), mass(n), loss(n);
  for (int64_t i = 0; i < n; ++i) starts[i + 1] = i + 1, columns[i] = i < 3 ? 0 : n, weights[i] = 1;
  const Cells<float> cells{n,       kKeep, nullptr, starts.get(), columns.get(), weights.get(),
                           nullptr, 0,     0,       nullptr,      nullptr,       nullptr,
                           nullptr, 0,     0};
  Report report;
  softmax_rows(cells, Tile<float>{scores.get(), n, 0, n, 0, n}, row_weights.get(),
               RowSums{logsumexp.get(), mass.get(), loss.get()}, report);
  require(report.status == kTargetOutside && report.row == 3 && report.column == n,
          "report of a bad target", -1);
}

}  // namespace
}  // namespace fastqt

int main(int count, char** arguments) {
  const int64_t problems = count > 1 ? std::atol(arguments[1]) : 200;
  for (int64_t problem = 0; problem < problems; ++problem) {
    fastqt::run<float>(problem);
    fastqt::run<double>(problem);
    fastqt::run_clip<float>(problem);
    fastqt::run_clip<double>(problem);
  }
  fastqt::report_of_bad_targets();
  std::printf("%ld problems\n", static_cast<long>(problems));
}
