#include "cpu/clip_tile.h"

#include <algorithm>
#include <limits>

#include "cpu/parallel.h"
#include "cpu/row_passes.h"

namespace fastqt {
namespace {

// Adds a tile to the sums of its rows, and replaces the scores of its pairs by -inf.
template <class T>
void add_rows(const Tile<T>& tile, const PairSums& sums) {
  in_parallel(tile.rows, tile.columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* const scores = tile.scores + i * tile.row_stride;
      const int64_t row = tile.first_row + i, diagonal = row - tile.first_column;
      tile.scale_row(i);
      if (diagonal >= 0 && diagonal < tile.columns) {
        sums.positive[row] = scores[diagonal];
        scores[diagonal] = -std::numeric_limits<T>::infinity();
      }
      const T largest = row_max(scores, tile.columns);
      if (largest == -std::numeric_limits<T>::infinity()) continue;
      const double total = row_exp_sum(scores, tile.columns, largest);
      sums.row_others[row] = log_add(sums.row_others[row], largest + std::log(total));
    }
  });
}

// Adds a tile to the sums of its columns. `add_rows` comes first, as it replaces the pairs by -inf.
template <class T>
void add_columns(const Tile<T>& tile, const PairSums& sums) {
  constexpr int64_t kStripe = 256;  // columns whose sums one thread keeps at a time
  constexpr int64_t kBlock = 64;    // rows after which a sum in fp32 is added to one in double
  const int64_t stripes = (tile.columns + kStripe - 1) / kStripe;
  in_parallel(stripes, kStripe * tile.rows, [&](int64_t begin, int64_t end) {
    T largest[kStripe], part[kStripe];
    double total[kStripe];
    for (int64_t first = begin * kStripe; first < std::min(end * kStripe, tile.columns); first += kStripe) {
      const int64_t width = std::min(kStripe, tile.columns - first);
      const T* const scores = tile.scores + first;
      std::fill_n(largest, width, std::numeric_limits<T>::lowest());  // not -inf, since -inf - -inf is NaN
      for (int64_t i = 0; i < tile.rows; ++i) row_raise(largest, scores + i * tile.row_stride, width);
      std::fill_n(total, width, 0.0);
      for (int64_t block = 0; block < tile.rows; block += kBlock) {
        std::fill_n(part, width, T(0));
        for (int64_t i = block; i < std::min(block + kBlock, tile.rows); ++i)
          row_exp_add(part, scores + i * tile.row_stride, largest, width);
        for (int64_t j = 0; j < width; ++j) total[j] += part[j];
      }
      for (int64_t j = 0; j < width; ++j) {
        double& others = sums.column_others[tile.first_column + first + j];
        others = log_add(others, largest[j] + std::log(total[j]));
      }
    }
  });
}

}  // namespace

template <class T>
void clip_tile(const Tile<T>& tile, const PairSums& sums) {
  add_rows(tile, sums);
  add_columns(tile, sums);
}

template <class T>
void clip_tile_backward(const Tile<T>& tile, const Softmax<T>& rows, const Softmax<T>& columns, bool visited) {
  in_parallel(tile.rows, tile.columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* const scores = tile.scores + i * tile.row_stride;
      const int64_t row = tile.first_row + i, diagonal = row - tile.first_column;
      if (!visited) tile.scale_row(i);
      row_two_exps(scores, tile.columns, rows.shifts[row], rows.factors[row],
                   columns.shifts.data() + tile.first_column, columns.factors.data() + tile.first_column);
      if (diagonal >= 0 && diagonal < tile.columns)
        scores[diagonal] = static_cast<T>(rows.diagonal[row] + columns.diagonal[row]);
      tile.scale_row(i);
    }
  });
}

#define FASTQT_INSTANTIATE(T)                            \
  template void clip_tile(const Tile<T>&, const PairSums&); \
  template void clip_tile_backward(const Tile<T>&, const Softmax<T>&, const Softmax<T>&, bool);
FASTQT_INSTANTIATE(float)
FASTQT_INSTANTIATE(double)

}  // namespace fastqt
