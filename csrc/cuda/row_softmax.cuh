// What a warp does with a row of scores: the softmax, the loss, dL/dS.
//
// Targets are apart from the other cells: w (rho p - t) has no correct digit left once a positive
// is learnt and p is close to t, unless it is computed from the sum of all other exponentials, in
// double.
#pragma once

#include "cuda/device.h"

namespace fastqt::cuda {

// What a warp keeps of its row in shared memory.
struct RowMemory {
  float products[kMostRows];
  float targets[kMostRows];
};

constexpr float kLargest16 = 32768;  // of what is stored as float16, in its units

struct alignas(16) Four {
  float at[4];
};
template <class T>
struct alignas(4 * sizeof(T)) FourOf {
  T at[4];
};

template <class X>
FASTQT_DEVICE X warp_sum(X x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}
FASTQT_DEVICE float warp_max(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, shuffle_xor(x, lanes));
  return x;
}
FASTQT_DEVICE uint64_t warp_or(uint64_t x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x |= shuffle_xor(x, lanes);
  return x;
}

FASTQT_DEVICE float scale_of(const SmallProblem& p) {
  return p.scale != nullptr ? *p.scale : p.scale_value;
}
FASTQT_DEVICE double row_weight_of(const SmallProblem& p, int row) {
  return p.row_weights != nullptr ? p.row_weights[row] : p.row_weight;
}

// A row's own negative, element by element; a mix is not normalised yet.
template <class V>
struct PrivateRow {
  const V *first, *second;
  float mix;

  FASTQT_DEVICE PrivateRow(const SmallProblem& p, int row) : second(nullptr), mix(p.mix) {
    const auto* const matrix =
        static_cast<const V*>(p.partners != nullptr ? p.candidates : p.row_negatives);
    first = matrix + int64_t{row} * p.D;
    if (p.partners != nullptr) second = matrix + p.partners[row] * p.D;
  }
  FASTQT_DEVICE float operator[](int d) const {
    const float x = to_float(first[d]);
    return second != nullptr ? mix * x + (1 - mix) * to_float(second[d]) : x;
  }
};

template <class V>
class RowSoftmax {
 public:
  // `unit` is what 1 means in stored coefficients.
  FASTQT_DEVICE RowSoftmax(const SmallProblem& p, int row, RowMemory& memory, float unit)
      : p_(p), row_(row), lane_(thread_index() % 32), memory_(memory), units_(1 / unit),
        scale_(scale_of(p)) {}

  // Into the warp's memory, before run(): no score is needed for it.
  static FASTQT_DEVICE void write_targets(const SmallProblem& p, int row, RowMemory& memory) {
    const int lane = thread_index() % 32;
    sync_warp();  // all are done with the row before

    for (int column = lane; column < p.pitch; column += 32) memory.targets[column] = 0;
    sync_warp();

    for (int64_t n = p.starts[row] + lane; n < p.starts[row + 1]; n += 32) {
      const double weight = p.weights[n];
      const int64_t column = p.columns[n];
      if (weight == 0) continue;

      require(weight > 0, "targets: want weights >= 0");
      require(column >= 0 && column < p.M, "targets: want columns of candidates");
      require(column != row || p.diagonal == kKeep, "targets: want none on a replaced diagonal");
      if (column >= 0 && column < p.M) memory.targets[column] = static_cast<float>(weight);
    }
    sync_warp();
  }

  FASTQT_DEVICE void run() {
    read_products();
    if (p_.has_private()) multiply_private();
    find_reference();
    sum();
    const double lse = static_cast<double>(reference_) + log(total_);
    if (lane_ == 0) {
      p_.logsumexp[row_] = lse;
      p_.mass[row_] = mass_;
      p_.loss[row_] = mass_ > 0 ? mass_ * lse + linear_ : 0;
    }
    if (p_.differentiates()) differentiate();
  }

 private:
  FASTQT_DEVICE void read_products() const {
    constexpr int kAtOnce =
        4;  // vectors of a lane, so that their loads, and those of four parts, overlap
    const int64_t part = int64_t{p_.N} * p_.pitch;
    const float* const products = p_.products + int64_t{row_} * p_.pitch;

    FASTQT_UNROLL_BY(1)
    for (int first = 4 * lane_; first < p_.pitch; first += 128 * kAtOnce) {
      Four sums[kAtOnce] = {};
      FASTQT_UNROLL_BY(4)
      for (int split = 0; split < p_.tiles.splits; ++split) FASTQT_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + 128 * k >= p_.pitch) continue;
        const Four more = *reinterpret_cast<const Four*>(products + split * part + first + 128 * k);
        FASTQT_UNROLL
        for (int n = 0; n < 4; ++n) sums[k].at[n] += more.at[n];
      }

      FASTQT_UNROLL
      for (int k = 0; k < kAtOnce; ++k)
        if (first + 128 * k < p_.pitch)
          *reinterpret_cast<Four*>(memory_.products + first + 128 * k) = sums[k];
    }
  }

  FASTQT_DEVICE void multiply_private() {
    const V* const query = static_cast<const V*>(p_.queries) + int64_t{row_} * p_.D;
    const PrivateRow<V> negative(p_, row_);

    float product = 0, square = 0;
    FASTQT_UNROLL_BY(8)
    for (int d = lane_; d < p_.D; d += 32) {
      const float r = negative[d];
      product += to_float(query[d]) * r;
      square += r * r;
    }

    product = warp_sum(product);
    const float inverse = p_.partners != nullptr ? 1 / fmaxf(sqrtf(warp_sum(square)), 1e-12f) : 1;
    private_product_ = product * inverse;
    if (lane_ == 0) p_.private_inverse_norms[row_] = inverse;
  }

  FASTQT_DEVICE bool replaced(int column) const { return column == row_ && p_.diagonal != kKeep; }

  FASTQT_DEVICE float score(int column) const {
    if (column >= p_.M || (column == row_ && p_.diagonal == kExclude)) return -INFINITY;
    return replaced(column) ? 0 : rounded_product(scale_, memory_.products[column]);
  }

  FASTQT_DEVICE float exponential(int column) const { return expf(score(column) - reference_); }
  FASTQT_DEVICE float private_score() const { return rounded_product(scale_, private_product_); }
  FASTQT_DEVICE float private_exponential() const { return expf(private_score() - reference_); }

  // Calls visit(first column) for the lane's cells, four adjacent ones at a time: those that it has
  // read itself.
  template <class F>
  FASTQT_DEVICE void for_fours(const F& visit) const {
    FASTQT_UNROLL_BY(1)
    for (int column = 4 * lane_; column < p_.pitch; column += 128) visit(column);
  }

  FASTQT_DEVICE void find_reference() {
    float largest = p_.has_private() ? private_score() : -INFINITY;
    for_fours([&](int column) {
      FASTQT_UNROLL
      for (int n = 0; n < 4; ++n) largest = fmaxf(largest, score(column + n));
    });
    largest = warp_max(largest);
    reference_ = largest == -INFINITY ? 0 : largest;
  }

  FASTQT_DEVICE void sum() {
    float plain = 0;
    double apart = 0;
    for_fours([&](int column) {
      FASTQT_UNROLL
      for (int n = 0; n < 4; ++n) {
        const float t = memory_.targets[column + n], e = exponential(column + n);
        if (t > 0) {
          apart += e;
          mass_ += t;
          linear_ += t * (static_cast<double>(logf(t)) - score(column + n));
        } else {
          plain += e;
        }
      }
    });

    total_ = warp_sum(plain + apart);
    if (p_.has_private()) total_ += private_exponential();
    mass_ = warp_sum(mass_);
    linear_ = warp_sum(linear_);
  }

  FASTQT_DEVICE void differentiate() const {
    const double weight = mass_ > 0 ? row_weight_of(p_, row_) / total_ : 0;
    const float plain_factor = mass_ > 0 ? static_cast<float>(weight * mass_) : 0;
    V* const coefficients = static_cast<V*>(p_.coefficients) + int64_t{row_} * p_.pitch;
    V* const remainders = static_cast<V*>(p_.remainders) + int64_t{row_} * p_.pitch;

    uint64_t exact_blocks = 0;
    double by_scale = 0;

    for_fours([&](int column) {
      FourOf<V> kept, lost;
      FASTQT_UNROLL
      for (int n = 0; n < 4; ++n) {
        const float t = memory_.targets[column + n], e = exponential(column + n);
        float c = replaced(column + n) || mass_ == 0 ? 0 : plain_factor * e;
        if (t > 0) {
          c = static_cast<float>(weight * ((mass_ - t) * e - t * (total_ - e)));
          exact_blocks |= uint64_t{1} << column / 16;
        }

        by_scale += static_cast<double>(c) * memory_.products[column + n];
        c *= units_;
        kept.at[n] = rounded_to<V>(c);
        if constexpr (sizeof(V) == 2)
          lost.at[n] = rounded_to<V>(t > 0 ? c - to_float(kept.at[n]) : 0);
      }

      *reinterpret_cast<FourOf<V>*>(coefficients + column) = kept;
      if constexpr (sizeof(V) == 2) *reinterpret_cast<FourOf<V>*>(remainders + column) = lost;
    });

    exact_blocks = warp_or(exact_blocks);
    by_scale = warp_sum(by_scale);
    if (lane_ != 0) return;

    p_.exact_blocks[row_] = exact_blocks;
    if (p_.has_private()) {
      const float c = mass_ > 0 ? plain_factor * private_exponential() : 0;
      p_.private_coefficients[row_] = c;
      by_scale += static_cast<double>(c) * private_product_;
    }
    p_.scale_terms[row_] = by_scale;
  }

  const SmallProblem& p_;
  const int row_, lane_;
  RowMemory& memory_;
  const float units_, scale_;
  float private_product_ = 0, reference_ = 0;
  double total_ = 0, mass_ = 0, linear_ = 0;
};

}  // namespace fastqt::cuda
