// A tile of scores in CLIP's loss, which has a softmax over each row and one over each column.
//
// The pairs are on the diagonal. Their cells are exact cells: they are left out of the sums and computed in double.
// With o the logsumexp of the other cells of row i, the loss of the row is log(1 + exp(o - s_ii)), which keeps its
// digits once the pair is learnt.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/log_sums.h"
#include "cpu/score_tile.h"

namespace fastqt {

// N values each: the score of each pair, and the logsumexp of the other cells in its row and in its column.
struct PairSums {
  double* positive;
  double* row_others;
  double* column_others;
};

// Adds a tile to the sums of its rows and columns. Stores the scores of its pairs, and writes -inf to their cells.
template <class S>
void clip_tile(const Tile<S>& tile, const PairSums& sums);

// The softmax of one direction: the gradient at a score is factor * exp(score - shift), with one shift and one
// factor for each row (or each column).
template <class T>
struct Softmax {
  Softmax(const double* positive, const double* others, const double* weights, int64_t n)
      : shifts(n), factors(n), diagonal(n) {
    for (int64_t i = 0; i < n; ++i) {
      const double logsumexp = log_add(others[i], positive[i]);
      shifts[i] = static_cast<T>(logsumexp);
      factors[i] = static_cast<T>(weights[i] / 2 * std::exp(shifts[i] - logsumexp));
      diagonal[i] = -weights[i] / 2 * std::exp(others[i] - logsumexp);
    }
  }

  std::vector<T> shifts, factors;
  std::vector<double> diagonal;  // the gradient at the scores of the pairs
};

// Turns the scores of a tile into the gradient of sum_i weights_i loss_i, the sum of both directions. A tile that
// `clip_tile` has had before is `visited`: its scores have their factors, unless they are rounded.
template <class S>
void clip_tile_backward(const Tile<S>& tile, const Softmax<Computed<S>>& rows, const Softmax<Computed<S>>& columns,
                        bool visited = false);

}  // namespace fastqt
