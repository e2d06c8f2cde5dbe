// A tile of scores in CLIP's loss, which has a softmax over each row and one over each column.
//
// The pairs are the first cells of the diagonal. They are exact cells: they are left out of the
// sums and computed in double. With o the logsumexp of the other cells of row i, the loss of the
// row is log(1 + exp(o - s_ii)), which keeps its digits once the pair is learnt.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/score_tile.h"

namespace fastqt {

// The score of each pair, and the logsumexp of the cells that are no pairs in each row and in each
// column.
struct PairSums {
  double* positive;
  double* row_others;
  double* column_others;
  int64_t pairs;  // cell (i, i) is a pair for i < pairs
};

// The gradient at the score of each pair.
struct PairGradients {
  const double* values;
  int64_t pairs;
};

// Adds a tile to the sums of its rows and columns. Stores the scores of its pairs, and writes -inf
// to their cells.
template <class S>
void clip_tile(const Tile<S>& tile, const PairSums& sums);

// The softmax of each row (or of each column) as a whole. The gradient at a score that is no pair's
// is weight * exp(score - logsumexp), which is computed as factor * exp(score - shift).
template <class T>
struct Softmax {
  Softmax(const double* logsumexp, const double* weights, int64_t n) : shifts(n), factors(n) {
    for (int64_t i = 0; i < n; ++i) {
      shifts[i] = static_cast<T>(logsumexp[i]);
      factors[i] = static_cast<T>(weights[i] * std::exp(shifts[i] - logsumexp[i]));
    }
  }

  std::vector<T> shifts, factors;
};

// Turns the scores of a tile into their gradient, the sum of both directions, or what is given at a
// pair. A tile that `clip_tile` has had before is `visited`: its scores have their factors, unless
// they are rounded.
template <class S>
void clip_tile_backward(const Tile<S>& tile, const Softmax<Computed<S>>& rows,
                        const Softmax<Computed<S>>& columns, const PairGradients& pairs,
                        bool visited = false);

}  // namespace fastqt
