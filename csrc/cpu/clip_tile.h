// A tile of scores as CLIP's loss takes it: a softmax over each row and one over each column.
//
// The diagonal holds the pairs. Its cells are kept out of the sums and computed in double: with o the
// log-sum-exp of the others, a row's loss is log(1 + exp(o - s_ii)), which loses nothing once it is learnt.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/log_sums.h"
#include "cpu/score_tile.h"

namespace fastqt {

// Of each pair, N values each: its score, and the log-sum-exp of the others in its row and in its column.
struct PairSums {
  double* positive;
  double* row_others;
  double* column_others;
};

// Adds a tile to the sums of its rows and columns, and reads its pairs, whose cells become -inf.
template <class T>
void clip_tile(const Tile<T>& tile, const PairSums& sums);

// What one direction makes of a score: exp(score - reference) * factor.
template <class T>
struct Softmax {
  Softmax(const double* positive, const double* others, const double* weights, int64_t n)
      : references(n), factors(n), diagonal(n) {
    for (int64_t i = 0; i < n; ++i) {
      const double logsumexp = log_add(others[i], positive[i]);
      references[i] = static_cast<T>(logsumexp);
      factors[i] = static_cast<T>(weights[i] / 2 * std::exp(references[i] - logsumexp));
      diagonal[i] = -weights[i] / 2 * std::exp(others[i] - logsumexp);
    }
  }

  std::vector<T> references, factors;
  std::vector<double> diagonal;  // the gradient at the pair's score
};

// The gradient of sum_i weights_i loss_i, from both directions.
template <class T>
void clip_tile_backward(const Tile<T>& tile, const Softmax<T>& rows, const Softmax<T>& columns);

}  // namespace fastqt
