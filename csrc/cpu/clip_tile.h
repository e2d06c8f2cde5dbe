// A tile of scores in CLIP's loss, which has a softmax over each row and one over each column.
//
// The pairs are the first cells of the diagonal. They are exact cells: they are left out of the
// sums and computed in double. With o the logsumexp of the other cells of row i, the loss of the
// row is log(1 + exp(o - s_ii)), which keeps its digits once the pair is learnt.
//
// A loss may want the sums of several multiples of the scores, each of which has softmaxes of its
// own. CLIP wants those of the scores themselves.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/score_tile.h"

namespace fastqt {

// The score of each pair, and of each multiple of the scores the logsumexp of the cells that are no
// pairs in each row and in each column.
struct PairSums {
  double* positive;
  double* row_others;     // (multiples, rows)
  double* column_others;  // (multiples, columns)
  int64_t pairs;          // cell (i, i) is a pair for i < pairs
  int64_t rows, columns;  // of all scores
  std::vector<double> multiples{1.0};
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

// The softmax of each row (or of each column) of a multiple of the scores as a whole. It gives a
// score that is no pair's the gradient multiple * weight * exp(multiple * score - logsumexp), which
// is computed as factor * exp(multiple * score - shift).
template <class T>
struct Softmax {
  Softmax(const double* logsumexp, const double* weights, int64_t n, double multiple)
      : shifts(n), factors(n) {
    for (int64_t i = 0; i < n; ++i) {
      shifts[i] = static_cast<T>(logsumexp[i]);
      factors[i] = static_cast<T>(multiple * weights[i] * std::exp(shifts[i] - logsumexp[i]));
    }
  }

  std::vector<T> shifts, factors;
};

// The softmaxes of both directions.
template <class T>
struct Softmaxes {
  T multiple;
  Softmax<T> rows, columns;
};

// Turns the scores of a tile into their gradient, the sum of both directions of each multiple, or
// what is given at a pair. A tile that `clip_tile` has had before is `visited`: its scores have
// their factors, unless they are rounded.
template <class S>
void clip_tile_backward(const Tile<S>& tile, const std::vector<Softmaxes<Computed<S>>>& softmaxes,
                        const PairGradients& pairs, bool visited = false);

}  // namespace fastqt
