// The loss of a tile of the score matrix, and its gradient, which is written over the scores.
//
// A tile holds the scores s * <f_i, g_j> of some rows and some columns. The first M columns are the
// candidates. The columns after them are the negatives, which are no row's target. A row may have
// one more cell, whose score is given. It counts in the tile that has column 0.
//
// Softmax: the loss of row i is sum_j T_ij (log T_ij - log P_ij). `softmax_rows` takes a tile of
// whole rows, finds their loss and turns their scores into its gradient. With other tiles there are
// two walks: `softmax_tile` adds each tile to the logsumexp and the loss of its rows, and
// `softmax_tile_backward` turns the scores into the gradient once the logsumexp of the whole row is
// known.
//
// Logsumexp: what the softmax functions find for rows of mass 1 without targets.
//
// Sigmoid: the loss of row i is sum_j log(1 + exp(s_ij)) - T_ij s_ij, a sum over cells that do not
// depend on each other. `sigmoid_tile` adds a tile to the loss of its rows; `sigmoid_tile_backward`
// does so too, and turns the scores into the gradient.
#pragma once

#include <cstdint>
#include <mutex>

#include "cpu/computed_row.h"
#include "cpu/dtypes.h"
#include "cpu/row_passes.h"

namespace fastqt {

// The values of `diagonal`, `link` and the status of a report, as in fastqt/problem.py.
enum Diagonal : int64_t { kZero = 0, kExclude = 1, kKeep = 2 };
enum Link : int64_t { kSoftmax = 0, kSigmoid = 1, kLogSumExp = 2 };
enum Status : int64_t {
  kOk = 0,
  kTargetOnDiagonal = 1,
  kTargetOutside = 2,
  kTargetNotPositive = 3,
  kTargetMasked = 4,
  kTargetNotFinite = 5,  // by itself, or in sum with the targets of its row before it
};

// The first target that a loss cannot have. The first is that of the lowest row, so that the report
// does not depend on the order of the threads.
class Report {
 public:
  void operator()(Status status, int64_t row, int64_t column) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (this->status == kOk || row < this->row)
      this->status = status, this->row = row, this->column = column;
  }

  int64_t status = kOk, row = 0, column = 0;

 private:
  std::mutex mutex_;
};

// The targets and the exclusions of the cells of the score matrix.
template <class T>
struct Cells {
  int64_t candidates;
  int64_t diagonal;
  const T* bias;              // (M,), added to the candidates' scores
  const int64_t* row_starts;  // the targets as compressed rows; null: they are a dense matrix
  const int64_t* columns;
  const double* weights;
  const T* dense;  // the targets as a matrix
  int64_t dense_row_stride, dense_column_stride;
  const double*
      background;  // (N,) or null: background[i] is added to the targets of all candidates in row i
  const int64_t* query_groups;
  const int64_t* candidate_groups;
  const bool* mask;
  int64_t mask_row_stride, mask_column_stride;
  const T* thresholds;  // (N,) or null: a cell leaves, unless it is a target, where its score
                        // without the bias is above
  T scale;              // scale * thresholds[row]
  const T* row_score =
      nullptr;  // (N,) or null: the score of one more cell of each row, which is in no tile
  T* row_score_gradient = nullptr;  // (N,) or null

  bool masked(int64_t row, int64_t column) const {
    return mask != nullptr && mask[row * mask_row_stride + column * mask_column_stride];
  }

  bool same_group(int64_t row, int64_t column) const {
    return query_groups != nullptr && query_groups[row] == candidate_groups[column];
  }
};

// S is the dtype of the embeddings. Scores in bfloat16 are rounded; rows of them are computed in
// float32.
template <class S>
struct Tile {
  using T = Computed<S>;

  S* scores;
  int64_t row_stride;
  int64_t first_row, rows;
  int64_t first_column, columns;
  // Of the tile's rows and columns, or both null: the functions below multiply the scores that they
  // are given by both factors, and in the end the gradients. These are inverse norms: the scores
  // are then cosines, and the products of the gradients with the embeddings lack the projection
  // that UnitRows::finish_gradient makes.
  const T* row_factors = nullptr;
  const T* column_factors = nullptr;
  // What the scores of targets are computed from once more, without rounding: in bfloat16 always,
  // else where those of a row are so near each other that their gradients cancel. Null where there
  // are no candidates in the tile.
  const S* queries = nullptr;     // of the tile's first row
  const S* candidates = nullptr;  // of the tile's first column
  int64_t query_stride = 0, candidate_stride = 0, width = 0;
  double scale = 1;
  const double* unrounded_row_factors = nullptr;  // as `row_factors` and `column_factors`
  const double* unrounded_column_factors = nullptr;

  void scale_row(int64_t i, T* row) const {
    if (row_factors != nullptr) row_scale(row, column_factors, columns, row_factors[i]);
  }

  // The score of a cell, its row and its column counted from the tile's first, from the embeddings.
  double unrounded(int64_t i, int64_t j) const {
    const double product =
        row_dot(queries + i * query_stride, candidates + j * candidate_stride, width);
    const double factor = unrounded_row_factors == nullptr
                              ? 1
                              : unrounded_row_factors[i] * unrounded_column_factors[j];
    return scale * factor * product;
  }
};

// N values each, of all rows of the score matrix. The softmax functions below add the targets'
// masses to those that rows have already. They leave the term mass * logsumexp out of the loss,
// because it is not known before the last tile of a row.
struct RowSums {
  double* logsumexp;
  double* mass;
  double* loss;
};

template <class S>
void softmax_rows(const Cells<Computed<S>>& cells, const Tile<S>& tile, const double* row_weights,
                  const RowSums& sums, Report& report);

template <class S>
void softmax_tile(const Cells<Computed<S>>& cells, const Tile<S>& tile, const RowSums& sums,
                  Report& report);

template <class S>
void softmax_tile_backward(const Cells<Computed<S>>& cells, const Tile<S>& tile,
                           const double* row_weights, const double* logsumexp, const double* mass,
                           Report& report);

template <class S>
void sigmoid_tile(const Cells<Computed<S>>& cells, const Tile<S>& tile, double* loss,
                  Report& report);

// The gradient of sum_i row_weights_i loss_i.
template <class S>
void sigmoid_tile_backward(const Cells<Computed<S>>& cells, const Tile<S>& tile,
                           const double* row_weights, double* loss, Report& report);

}  // namespace fastqt
