#include "cpu/clip_tile.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "cpu/computed_row.h"
#include "cpu/log_sums.h"
#include "cpu/parallel.h"
#include "cpu/row_passes.h"

namespace fastqt {
namespace {

// A row of scores times a number: the row itself where that is 1, or else a copy.
template <class T>
class MultipliedRow {
 public:
  T* of(T* row, int64_t width, T multiple) {
    if (multiple == 1) return row;
    copy_.resize(width);
    row_multiple(copy_.data(), row, width, multiple, false);
    return copy_.data();
  }

 private:
  std::vector<T> copy_;
};

// The column of the tile in which one of its rows has its pair, if it has one there.
template <class S>
std::optional<int64_t> pair_column(const Tile<S>& tile, int64_t row, int64_t pairs) {
  const int64_t column = row - tile.first_column;
  if (row >= pairs || column < 0 || column >= tile.columns) return std::nullopt;
  return column;
}

// Adds a tile to the sums of its rows, and replaces the scores of its pairs by -inf.
template <class S>
void add_rows(const Tile<S>& tile, const PairSums& sums) {
  using T = Computed<S>;
  constexpr T kExcluded = -std::numeric_limits<T>::infinity();

  in_parallel(tile.rows, tile.columns, [&](int64_t begin, int64_t end) {
    ComputedRow<S> computed(tile.columns);
    MultipliedRow<T> multiplied;
    for (int64_t i = begin; i < end; ++i) {
      S* const stored = tile.scores + i * tile.row_stride;
      T* const scores = computed.read(stored, tile.columns);

      const int64_t row = tile.first_row + i;
      tile.scale_row(i, scores);
      if (const auto pair = pair_column(tile, row, sums.pairs)) {
        sums.positive[row] = positive_score(kRounds<S> ? tile.unrounded(i, *pair) : scores[*pair]);
        scores[*pair] = kExcluded;
        stored[*pair] = S(kExcluded);
      }

      double* others = sums.row_others + row;
      for (const double multiple : sums.multiples) {
        const T* const each = multiplied.of(scores, tile.columns, static_cast<T>(multiple));
        const T largest = row_max(each, tile.columns);
        // Where no score is larger than -inf, all are -inf or NaN, and so is their sum.
        const double total = largest == kExcluded
                                 ? row_sum(each, tile.columns)
                                 : largest + std::log(row_exp_sum(each, tile.columns, largest));
        *others = log_add(*others, total);
        others += sums.rows;
      }
    }
  });
}

// Adds a multiple of a tile to the sums of its columns, (columns). `add_rows` comes first, as it
// replaces the pairs by -inf.
template <class S>
void add_columns(const Tile<S>& tile, double multiple, double* column_others) {
  using T = Computed<S>;
  constexpr int64_t kStripe = 256;  // columns whose sums one thread keeps at a time
  constexpr int64_t kBlock = 64;    // rows after which a sum in fp32 is added to one in double
  const int64_t stripes = (tile.columns + kStripe - 1) / kStripe;

  in_parallel(stripes, kStripe * tile.rows, [&](int64_t begin, int64_t end) {
    T largest[kStripe], part[kStripe];
    double total[kStripe];
    ComputedRow<S> computed(kStripe);
    MultipliedRow<T> multiplied;

    // A row of the stripe. `add_rows` has left the factors in the scores, unless those are rounded.
    const auto scores = [&](int64_t i, int64_t first, int64_t width) {
      T* const row = computed.read(tile.scores + i * tile.row_stride + first, width);
      if (kRounds<S> && tile.row_factors != nullptr)
        row_scale(row, tile.column_factors + first, width, tile.row_factors[i]);
      return multiplied.of(row, width, static_cast<T>(multiple));
    };

    for (int64_t first = begin * kStripe; first < std::min(end * kStripe, tile.columns);
         first += kStripe) {
      const int64_t width = std::min(kStripe, tile.columns - first);
      std::fill_n(largest, width,
                  std::numeric_limits<T>::lowest());  // not -inf, since -inf - -inf is NaN
      for (int64_t i = 0; i < tile.rows; ++i) row_raise(largest, scores(i, first, width), width);

      std::fill_n(total, width, 0.0);
      for (int64_t block = 0; block < tile.rows; block += kBlock) {
        std::fill_n(part, width, T(0));
        for (int64_t i = block; i < std::min(block + kBlock, tile.rows); ++i)
          row_exp_add(part, scores(i, first, width), largest, width);
        for (int64_t j = 0; j < width; ++j) total[j] += part[j];
      }

      for (int64_t j = 0; j < width; ++j) {
        double& others = column_others[tile.first_column + first + j];
        others = log_add(others, largest[j] + std::log(total[j]));
      }
    }
  });
}

}  // namespace

template <class S>
void clip_tile(const Tile<S>& tile, const PairSums& sums) {
  add_rows(tile, sums);
  double* others = sums.column_others;
  for (const double multiple : sums.multiples) {
    add_columns(tile, multiple, others);
    others += sums.columns;
  }
}

template <class S>
void clip_tile_backward(const Tile<S>& tile, const std::vector<Softmaxes<Computed<S>>>& softmaxes,
                        const PairGradients& pairs, bool visited) {
  using T = Computed<S>;
  const bool alone = softmaxes.size() == 1 && softmaxes.front().multiple == 1;
  in_parallel(tile.rows, tile.columns, [&](int64_t begin, int64_t end) {
    ComputedRow<S> computed(tile.columns);
    std::vector<T> multiplied(alone ? 0 : tile.columns), sum(alone ? 0 : tile.columns);
    for (int64_t i = begin; i < end; ++i) {
      S* const stored = tile.scores + i * tile.row_stride;
      T* const scores = computed.read(stored, tile.columns);
      const int64_t row = tile.first_row + i;
      if (kRounds<S> || !visited) tile.scale_row(i, scores);

      const auto replace = [&](T* cells, const Softmaxes<T>& by) {
        row_two_exps(cells, tile.columns, by.rows.shifts[row], by.rows.factors[row],
                     by.columns.shifts.data() + tile.first_column,
                     by.columns.factors.data() + tile.first_column);
      };
      if (alone) {
        replace(scores, softmaxes.front());
      } else {
        std::fill(sum.begin(), sum.end(), T(0));
        for (const Softmaxes<T>& by : softmaxes) {
          row_multiple(multiplied.data(), scores, tile.columns, by.multiple, false);
          replace(multiplied.data(), by);
          row_add(sum.data(), multiplied.data(), tile.columns);
        }
        std::copy(sum.begin(), sum.end(), scores);
      }

      if (const auto pair = pair_column(tile, row, pairs.pairs))
        scores[*pair] = static_cast<T>(pairs.values[row]);
      tile.scale_row(i, scores);
      computed.write(stored, tile.columns);
    }
  });
}

#define FASTQT_INSTANTIATE(S)                                                                  \
  template void clip_tile(const Tile<S>&, const PairSums&);                                    \
  template void clip_tile_backward(const Tile<S>&, const std::vector<Softmaxes<Computed<S>>>&, \
                                   const PairGradients&, bool);
FASTQT_INSTANTIATE(float)
FASTQT_INSTANTIATE(double)
FASTQT_INSTANTIATE(BFloat16)

}  // namespace fastqt
