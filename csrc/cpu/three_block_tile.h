// MixCSE's three blocks of scores, which are all sums of one or two cosines: a chunk of rows of
// these is turned into the loss of each row, and into the gradients at the cosines.
//
// With C the cosines, s the scale and indices modulo n, row i scores s C_ij in the first block,
// s (own_columns_j C_ij + next_columns_j C_i,j+1) in the second and s (own_rows_i C_ij +
// next_rows_i C_i+1,j) in the third. The cell (i, i) of the first block is the positive. It is an
// exact cell, as in clip_tile.h. The masked cells, whose mixture contains the sentence as a
// partner, are (i, i-1) of the second block and (i, i+1) of the third.
#pragma once

#include <cstdint>

namespace fastqt {

// What all chunks have in common.
template <class T>
struct ThreeBlocks {
  int64_t n;
  T scale;
  bool third_block, masks_excluded;  // a masked cell that is not excluded scores 0
  T own_mixture_weight;  // added to the cells (i, i) of the second and of the third block
  // (n,) each
  const T *own_columns, *next_columns, *own_rows, *next_rows;
  const T*
      next_columns_before;  // next_columns of the column before, which is the last one for column 0
};

// Rows of a matrix.
template <class T>
struct Lines {
  T* data;
  int64_t stride;
  T* operator[](int64_t row) const { return data + row * stride; }
};

// The rows [first_row, first_row + rows) of the score matrix.
template <class T>
struct ThreeBlockChunk {
  int64_t first_row, rows;
  // (rows + 2, n + 1): the cosines of rows first_row - 1 to first_row + rows. The last column
  // repeats the first.
  Lines<T> cosines;
  double* loss;           // (n,): written for the chunk's rows
  const double* weights;  // (n,), or null where no gradient is wanted
  // (rows, n): the gradients at the cosines by which the queries' gradient is found, and the
  // candidates'. Null where there is none. If both are one matrix, the gradient goes through all
  // mixtures; else each leaves out the mixtures that its own embeddings are in.
  Lines<T> to_queries, to_candidates;
};

// The gradients at the shares, and that at the scale, all without the factor s that they have in
// common.
struct ShareSums {
  double *own_columns, *next_columns, *own_rows,
      *next_rows;     // (n,) each; of the columns, chunks are added up
  double* positives;  // (1,): the part of the scale's gradient that comes from the first block
};

// Finds the losses of a chunk's rows; with weights, those gradients too. `sums` is null where they
// are not wanted.
template <class T>
void three_block_chunk(const ThreeBlocks<T>& blocks, const ThreeBlockChunk<T>& chunk,
                       const ShareSums* sums);

}  // namespace fastqt
