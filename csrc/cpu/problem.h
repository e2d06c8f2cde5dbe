// The problem that the operators of contrastive.cpp are given, checked before anything is read from
// it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "cpu/blocks.h"
#include "cpu/score_tile.h"

namespace fastqt {

// The fields of a problem, by the names that they have in fastqt/problem.py and
// fastqt/targets/base.py, in the order in which the operators take them. S is the dtype of the
// queries, and T the one that they are computed in. This is the one list of them: the struct, the
// operators' schemas and their arguments are made from it.
#define FASTQT_PROBLEM(FIELD)                                                                      \
  FIELD(Tensor, queries)                      /* (N, D) S */                                       \
  FIELD(Tensor, candidates)                   /* (M, D) S */                                       \
  FIELD(std::optional<Tensor>, negatives)     /* (K, D) S */                                       \
  FIELD(std::optional<Tensor>, row_negatives) /* (N, D) S */                                       \
  FIELD(std::optional<Tensor>, bias)          /* (M,) T, added to the scores of the candidates */  \
  FIELD(double, scale)                                                                             \
  FIELD(int64_t, link)                       /* of enum Link */                                    \
  FIELD(int64_t, diagonal)                   /* of enum Diagonal */                                \
  FIELD(std::optional<Tensor>, starts)       /* (N + 1,) int64: targets as compressed rows, */     \
  FIELD(std::optional<Tensor>, columns)      /* (nnz,) int64 */                                    \
  FIELD(std::optional<Tensor>, weights)      /* (nnz,) float64 */                                  \
  FIELD(std::optional<Tensor>, dense)        /* (N, M) T: or as a matrix, with S = T */            \
  FIELD(std::optional<Tensor>, background)   /* (N,) float64, added to the targets of all cells */ \
  FIELD(std::optional<Tensor>, query_groups) /* (N,) int64 */                                      \
  FIELD(std::optional<Tensor>, candidate_groups) /* (M,) int64 */                                  \
  FIELD(std::optional<Tensor>, mask)             /* (N, M) bool, true where a cell is excluded */  \
  FIELD(bool, normalize)                   /* scores are of the rows of embeddings at norm 1 */    \
  FIELD(std::optional<Tensor>, row_scores) /* (N,) T: the score of one more cell of each row */    \
  FIELD(std::optional<Tensor>, thresholds) /* (N,) T: of products above which cells leave */

struct Problem {
#define FASTQT_MEMBER(type, name) const type& name;
  FASTQT_PROBLEM(FASTQT_MEMBER)
#undef FASTQT_MEMBER

  int64_t rows() const { return queries.size(0); }
  Embeddings embeddings() const { return {queries, candidates, negatives, row_negatives}; }
};

// Those fields that there are gradients of, in the order of Inputs in fastqt/problem.py.
#define FASTQT_INPUTS(INPUT) \
  INPUT(queries)             \
  INPUT(candidates) INPUT(negatives) INPUT(row_negatives) INPUT(scale) INPUT(bias) INPUT(row_scores)

// The tensors that the gradients are written to; one that is not needed has no tensor. Those of the
// row scores are written by the functions of score_tile.h, and all others by the walk.
struct Gradients {
#define FASTQT_MEMBER(name) std::optional<Tensor> name;
  FASTQT_INPUTS(FASTQT_MEMBER)
#undef FASTQT_MEMBER
};

// Every argument has the dtype, shape and layout that are written above, and the compressed rows
// are within the entries. Columns, weights and the targets' cells are checked where they are read,
// and reported by their row (see score_tile.h).
void check(const Problem& p);

// What the functions of score_tile.h read of a problem that has been checked, and the gradient that
// they write.
template <class T>
Cells<T> cells_of(const Problem& p, const Gradients& gradients);

}  // namespace fastqt
