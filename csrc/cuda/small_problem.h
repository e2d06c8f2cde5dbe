// A contrastive loss of at most 1024 x 1024 scores, as the one-launch kernel takes it, and the
// workspace that this needs. Plain C++: the operator, the kernel and its tests on a CPU share it.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fastqt::cuda {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

constexpr int kMostRows = 1024;   // of queries, and of candidates
constexpr int kMostWidth = 4800;  // of embeddings
constexpr int kMostSplits = 16;   // of the inner dimension of the scores

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileDepth = 32;  // of a product's inner dimension at a time

// As in fastqt/problem.py.
enum Diagonal : int { kZero = 0, kExclude = 1, kKeep = 2 };

// How many tiles the kernel's products have, by rows and by columns, as tiling.h chooses them.
struct Tiles {
  int splits;  // of the inner dimension of the scores
  int score_down, score_across;
  int query_down, candidate_down, gradient_across;  // 0 by rows for a gradient that is not wanted
};

// All matrices have adjacent elements and rows; pointers that may be null say so.
struct SmallProblem {
  int N, M, D;
  const void* queries;        // (N, D)
  const void* candidates;     // (M, D)
  const void* row_negatives;  // (N, D) or null
  const int64_t*
      partners;  // (N,) or null: row i's negative is mix g_i + (1 - mix) g_partner at norm 1
  float mix;
  const float* scale;  // () or null: then scale_value
  float scale_value;
  int diagonal;
  const int64_t* starts;   // (N + 1,): targets as compressed rows
  const int64_t* columns;  // entries of weight 0 mean nothing
  const double* weights;
  const double* row_weights;  // (N,) or null: then row_weight for all
  double row_weight;

  double* logsumexp;  // (N,)
  double* mass;       // (N,)
  double* loss;       // (N,)
  float* total;       // () or null: sum_i row_weight_i loss_i
  void* dqueries;     // the gradients of that sum, each null if it is not wanted
  void* dcandidates;
  void* drow_negatives;
  double* dscale;

  Tiles tiles;

  // The workspace.
  int pitch;                 // elements from one row of N x M matrices to the next
  float* products;           // (splits, N, M): F G^T in parts
  void* coefficients;        // (N, M): dL/dS, rounded to the elements' type
  void* remainders;          // (N, M): what rounding took from the coefficients of exact cells
  uint64_t* exact_blocks;    // (N,): bit b is set if columns 16 b .. 16 b + 15 have an exact cell
  float* coefficient_bound;  // (N,): |row weight| * mass, which no coefficient of the row exceeds
  float* private_coefficients;   // (N,)
  float* private_inverse_norms;  // (N,)
  double* scale_terms;           // (N,)

  constexpr bool has_private() const { return row_negatives != nullptr || partners != nullptr; }
  constexpr bool differentiates() const {
    return dqueries || dcandidates || drow_negatives || dscale;
  }
};

constexpr int padded_columns(int M) { return (M + 7) / 8 * 8; }

// Points the problem's workspace into `memory`, and returns its bytes; without memory, only these.
inline int64_t lay_out_workspace(SmallProblem& p, int element_bytes, void* memory) {
  p.pitch = padded_columns(p.M);
  int64_t used = 0;
  const auto take = [&](auto*& pointer, int64_t bytes) {
    if (memory != nullptr)
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(
          static_cast<char*>(memory) + used);
    used += (bytes + 15) / 16 * 16;
  };
  const int64_t cells = int64_t{p.N} * p.pitch;
  take(p.products, p.tiles.splits * cells * 4);
  take(p.coefficients, cells * element_bytes);
  take(p.remainders, element_bytes == 2 ? cells * element_bytes : 0);
  take(p.exact_blocks, int64_t{p.N} * 8);
  take(p.coefficient_bound, int64_t{p.N} * 4);
  take(p.private_coefficients, int64_t{p.N} * 4);
  take(p.private_inverse_norms, int64_t{p.N} * 4);
  take(p.scale_terms, int64_t{p.N} * 8);
  return used;
}

}  // namespace fastqt::cuda
