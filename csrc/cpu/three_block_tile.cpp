#include "cpu/three_block_tile.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/log_sums.h"
#include "cpu/parallel.h"
#include "cpu/row_passes.h"
#include "cpu/vector_math.h"

namespace fastqt {
namespace {

// Rows that a thread takes one after the other. Each piece computes the row above it once more,
// whose mixture has a part in its first row. Sums over the rows of a piece are in T.
constexpr int64_t kPiece = 32;

// The scores of a row in the second and in the third block.
template <class T>
FASTQT_INLINE void mixtures_body(const T* x, const T* own, const T* next, int64_t n, T scale,
                                 T* scores) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) scores[j] = scale * (own[j] * x[j] + next[j] * x[j + 1]);
}

template <class T>
FASTQT_INLINE void mixture_body(const T* x, const T* below, int64_t n, T own, T next, T* scores) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) scores[j] = own * x[j] + next * below[j];
}

// out_j = f (first_j + second_j own_j + second_j-1 before_j)
template <class T>
FASTQT_INLINE void fold_columns_body(T* out, const T* first, const T* second, const T* own,
                                     const T* before, int64_t n, T f) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j)
    out[j] = without_subnormals(f * (first[j] + second[j] * own[j] + second[j - 1] * before[j]));
}

// out_j = f x_j + own third_j + next above_j
template <class T>
FASTQT_INLINE void fold_rows_body(T* out, const T* x, const T* third, const T* above, int64_t n,
                                  T f, T own, T next) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j)
    out[j] = without_subnormals(f * x[j] + own * third[j] + next * above[j]);
}

// own_j = own_j + f second_j x_j, next_j = next_j + f second_j x_j+1
template <class T>
FASTQT_INLINE void add_shares_body(T* own, T* next, const T* second, const T* x, int64_t n, T f) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const T d = f * second[j];
    own[j] += d * x[j];
    next[j] += d * x[j + 1];
  }
}

#define FASTQT_PASSES(T)                                                                           \
  FASTQT_CLONES void mixtures(const T* x, const T* own, const T* next, int64_t n, T scale,         \
                              T* scores) {                                                         \
    mixtures_body(x, own, next, n, scale, scores);                                                 \
  }                                                                                                \
  FASTQT_CLONES void mixture(const T* x, const T* below, int64_t n, T own, T next, T* scores) {    \
    mixture_body(x, below, n, own, next, scores);                                                  \
  }                                                                                                \
  FASTQT_CLONES void fold_columns(T* out, const T* first, const T* second, const T* own,           \
                                  const T* before, int64_t n, T f) {                               \
    fold_columns_body(out, first, second, own, before, n, f);                                      \
  }                                                                                                \
  FASTQT_CLONES void fold_rows(T* out, const T* x, const T* third, const T* above, int64_t n, T f, \
                               T own, T next) {                                                    \
    fold_rows_body(out, x, third, above, n, f, own, next);                                         \
  }                                                                                                \
  FASTQT_CLONES void add_shares(T* own, T* next, const T* second, const T* x, int64_t n, T f) {    \
    add_shares_body(own, next, second, x, n, f);                                                   \
  }
FASTQT_PASSES(float)
FASTQT_PASSES(double)

// One row at a time: the exponentials of its scores less their largest, and the factor that makes
// them gradients.
template <class T>
class Row {
 public:
  explicit Row(const ThreeBlocks<T>& blocks)
      : blocks_(blocks), first_(blocks.n), second_(blocks.n + kAhead), third_(blocks.n),
        above_(blocks.n) {}

  // Takes a row, of which the one that it had before is the one above. Returns its loss.
  double enter(const T* x, const T* below, int64_t row) {
    const int64_t n = blocks_.n;
    row_ = row;
    x_ = x;
    below_ = below;
    third_.swap(above_);
    factor_above_ = factor_ * own_next_;
    own_next_ = blocks_.next_rows[row];
    row_multiple(first_.data(), x, n, blocks_.scale, false);
    mixtures(x, blocks_.own_columns, blocks_.next_columns, n, blocks_.scale, second());
    positive_ = positive_score(first_[row]);
    first_[row] = -std::numeric_limits<T>::infinity();
    mask(second(), row == 0 ? n - 1 : row - 1);
    if (blocks_.third_block) {
      mixture(x, below, n, blocks_.scale * blocks_.own_rows[row], blocks_.scale * own_next_,
              third_.data());
      mask(third_.data(), row == n - 1 ? 0 : row + 1);
    }
    return find_loss();
  }

  // Makes the row's gradients those of `weight` times its loss.
  void weigh(double weight) {
    const double logsumexp = log_add(others_, positive_);
    factor_ = static_cast<T>(weight * std::exp(shift_ - logsumexp));
    positive_gradient_ = -weight * std::exp(others_ - logsumexp);
    // What a masked cell scores does not depend on the embeddings.
    second()[row_ == 0 ? blocks_.n - 1 : row_ - 1] = 0;
    second()[-1] = second()[blocks_.n - 1];
    third_[row_ == blocks_.n - 1 ? 0 : row_ + 1] = 0;
  }

  void write_to_queries(T* out) const {
    fold_columns(out, first_.data(), second(), blocks_.own_columns, blocks_.next_columns_before,
                 blocks_.n, factor_);
    out[row_] += static_cast<T>(positive_gradient_);
  }

  void write_to_candidates(T* out) const {
    add_third_block(out, first_.data(), factor_);
    out[row_] += static_cast<T>(positive_gradient_);
  }

  void write_to_both(T* out) const {
    write_to_queries(out);
    if (blocks_.third_block) add_third_block(out, out, T(1));
  }

  // Adds to the sums of the columns' shares, (n,) each, and writes or adds to the others.
  void add_to_shares(T* own_columns, T* next_columns, const ShareSums& sums,
                     double& positives) const {
    const int64_t n = blocks_.n;
    add_shares(own_columns, next_columns, second(), x_, n, factor_);
    positives += factor_ * row_dot(first_.data(), x_, n) + positive_gradient_ * x_[row_];
    sums.own_rows[row_] = factor_ * row_dot(third_.data(), x_, n);
    sums.next_rows[row_] = factor_ * row_dot(third_.data(), below_, n);
  }

 private:
  static constexpr int64_t kAhead =
      16;  // elements before the second block's first, the last of which is in use

  T* second() { return second_.data() + kAhead; }
  const T* second() const { return second_.data() + kAhead; }

  void mask(T* scores, int64_t masked) const {
    scores[row_] += blocks_.own_mixture_weight;
    scores[masked] = blocks_.masks_excluded ? -std::numeric_limits<T>::infinity() : T(0);
  }

  // The loss is log(1 + exp(o - p)) with p the positive and o the logsumexp of all others.
  double find_loss() {
    const int64_t n = blocks_.n;
    T shift = std::max(row_max(first_.data(), n), row_max(second(), n));
    if (blocks_.third_block) shift = std::max(shift, row_max(third_.data(), n));
    double total = row_exp(first_.data(), n, shift) + row_exp(second(), n, shift);
    if (blocks_.third_block) total += row_exp(third_.data(), n, shift);
    shift_ = shift;
    others_ = shift + std::log(total);
    return softplus(others_ - positive_);
  }

  void add_third_block(T* out, const T* x, T f) const {
    fold_rows(out, x, third_.data(), above_.data(), blocks_.n, f, factor_ * blocks_.own_rows[row_],
              factor_above_);
  }

  const ThreeBlocks<T>& blocks_;
  std::vector<T> first_, second_, third_,
      above_;  // third_ and above_ stay 0 where there is no third block
  const T *x_ = nullptr, *below_ = nullptr;
  int64_t row_ = 0;
  double positive_ = 0, others_ = 0, shift_ = 0, positive_gradient_ = 0;
  T factor_ = 0, factor_above_ = 0, own_next_ = 0;
};

}  // namespace

template <class T>
void three_block_chunk(const ThreeBlocks<T>& blocks, const ThreeBlockChunk<T>& chunk,
                       const ShareSums* sums) {
  const int64_t n = blocks.n, pieces = (chunk.rows + kPiece - 1) / kPiece;
  std::vector<T> columns(sums == nullptr ? 0 : pieces * 2 * n);
  std::vector<double> positives(pieces);

  in_parallel(pieces, 3 * kPiece * n, [&](int64_t begin, int64_t end) {
    Row<T> row(blocks);
    for (int64_t piece = begin; piece < end; ++piece) {
      const auto enter = [&](int64_t i) {
        const int64_t r = (chunk.first_row + i + n) % n;
        const double loss = row.enter(chunk.cosines[i + 1], chunk.cosines[i + 2], r);
        if (chunk.weights != nullptr) row.weigh(chunk.weights[r]);
        return loss;
      };

      const int64_t first = piece * kPiece, last = std::min(first + kPiece, chunk.rows);
      if (chunk.weights != nullptr && blocks.third_block && piece == begin) enter(first - 1);

      for (int64_t i = first; i < last; ++i) {
        chunk.loss[chunk.first_row + i] = enter(i);
        if (chunk.to_queries.data == chunk.to_candidates.data) {
          if (chunk.to_queries.data != nullptr) row.write_to_both(chunk.to_queries[i]);
        } else {
          if (chunk.to_queries.data != nullptr) row.write_to_queries(chunk.to_queries[i]);
          if (chunk.to_candidates.data != nullptr) row.write_to_candidates(chunk.to_candidates[i]);
        }

        if (sums != nullptr)
          row.add_to_shares(&columns[2 * piece * n], &columns[(2 * piece + 1) * n], *sums,
                            positives[piece]);
      }
    }
  });

  if (sums == nullptr) return;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    *sums->positives += positives[piece];
    for (int64_t j = 0; j < n; ++j) {
      sums->own_columns[j] += columns[2 * piece * n + j];
      sums->next_columns[j] += columns[(2 * piece + 1) * n + j];
    }
  }
}

#define FASTQT_INSTANTIATE(T)                                                       \
  template void three_block_chunk(const ThreeBlocks<T>&, const ThreeBlockChunk<T>&, \
                                  const ShareSums*);
FASTQT_INSTANTIATE(float)
FASTQT_INSTANTIATE(double)

}  // namespace fastqt
