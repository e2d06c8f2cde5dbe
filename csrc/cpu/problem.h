// The problem that the operators of contrastive.cpp are given, checked before anything is read from it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "cpu/score_tile.h"
#include "cpu/walk.h"

namespace fastqt {

// As in fastqt/problem.py. S is the dtype of the queries, and T the one that they are computed in.
struct Problem {
  const Tensor& queries;                         // (N, D) S
  const Tensor& candidates;                      // (M, D) S
  const std::optional<Tensor>& negatives;        // (K, D) S
  const std::optional<Tensor>& row_negatives;    // (N, D) S
  const std::optional<Tensor>& bias;             // (M,) T, added to the scores of the candidates
  const double scale;
  const int64_t link;                            // of enum Link
  const int64_t diagonal;                        // of enum Diagonal
  const std::optional<Tensor>& row_starts;       // (N + 1,) int64: targets as compressed rows,
  const std::optional<Tensor>& columns;          // (nnz,) int64
  const std::optional<Tensor>& weights;          // (nnz,) float64
  const std::optional<Tensor>& dense;            // (N, M) T: or as a matrix, with S = T
  const std::optional<Tensor>& background;       // (N,) float64, added to the targets of all candidates
  const std::optional<Tensor>& query_groups;     // (N,) int64
  const std::optional<Tensor>& candidate_groups; // (M,) int64
  const std::optional<Tensor>& mask;             // (N, M) bool, true where a cell is excluded
  const bool normalize;                          // scores are of the rows of all embeddings at norm 1
  const std::optional<Tensor>& row_scores;       // (N,) T: the score of one more cell of each row

  int64_t rows() const { return queries.size(0); }
  Embeddings embeddings() const { return {queries, candidates, negatives, row_negatives}; }
};

// Every argument has the dtype, shape and layout that are written above, and the compressed rows are within
// the entries. Columns, weights and the targets' cells are checked where they are read, and reported by their
// row (see score_tile.h).
void check(const Problem& p);

// What the functions of score_tile.h read of a problem that has been checked, and the gradient that they write.
template <class T>
Cells<T> cells_of(const Problem& p, const Gradients& gradients);

}  // namespace fastqt
