#include "cpu/gru_rows.h"

#include "cpu/vector_math.h"

namespace fastqt {
namespace {

template <class T>
FASTQT_INLINE void reset_after_body(T* gates, const T* recurrent, const T* bias, const T* state,
                                    T* hidden_n, T* next, int64_t H) {
  const T *bias_r = bias, *bias_z = bias + H, *bias_n = bias + 2 * H, *bias_hn = bias + 3 * H;
  T *r = gates, *z = r + H, *n = z + H;
#pragma omp simd
  for (int64_t j = 0; j < H; ++j) {
    const T rj = sigmoid_(r[j] + recurrent[j] + bias_r[j]);
    const T zj = sigmoid_(z[j] + recurrent[H + j] + bias_z[j]);
    const T hnj = recurrent[2 * H + j] + bias_hn[j];
    const T nj = tanh_(n[j] + bias_n[j] + rj * hnj);
    r[j] = rj;
    z[j] = zj;
    n[j] = nj;
    hidden_n[j] = hnj;
    next[j] = nj + zj * (state[j] - nj);
  }
}

template <class T>
FASTQT_INLINE void reset_after_backward_body(const T* gates, const T* hidden_n, const T* state,
                                             const T* grad_output, T* carry, T* grad_gates,
                                             int64_t H) {
  const T *r = gates, *z = r + H, *n = z + H;
  T *d_n = grad_gates, *d_r = d_n + H, *d_z = d_r + H, *d_hn = d_z + H;
#pragma omp simd
  for (int64_t j = 0; j < H; ++j) {
    const T d = carry[j] + grad_output[j];
    const T dn = d * (1 - z[j]) * (1 - n[j] * n[j]);
    d_n[j] = dn;
    d_r[j] = dn * hidden_n[j] * r[j] * (1 - r[j]);
    d_z[j] = d * (state[j] - n[j]) * z[j] * (1 - z[j]);
    d_hn[j] = dn * r[j];
    carry[j] = d * z[j];
  }
}

template <class T>
FASTQT_INLINE void reset_before_body(T* gates, const T* recurrent, const T* bias, const T* state,
                                     T* reset_state, int64_t H) {
  T *r = gates, *z = r + H;
#pragma omp simd
  for (int64_t j = 0; j < H; ++j) {
    r[j] = sigmoid_(r[j] + recurrent[j] + bias[j]);
    z[j] = sigmoid_(z[j] + recurrent[H + j] + bias[H + j]);
    reset_state[j] = r[j] * state[j];
  }
}

template <class T>
FASTQT_INLINE void reset_before_candidate_body(T* gates, const T* recurrent, const T* bias,
                                               const T* state, T* next, int64_t H) {
  const T *z = gates + H, *bias_n = bias + 2 * H;
  T* n = gates + 2 * H;
#pragma omp simd
  for (int64_t j = 0; j < H; ++j) {
    const T nj = tanh_(n[j] + recurrent[j] + bias_n[j]);
    n[j] = nj;
    next[j] = nj + z[j] * (state[j] - nj);
  }
}

template <class T>
FASTQT_INLINE void reset_before_backward_body(const T* gates, const T* state, const T* grad_output,
                                              T* carry, T* grad_gates, int64_t H) {
  const T *r = gates, *z = r + H, *n = z + H;
  T *d_z = grad_gates + H, *d_n = d_z + H, *rh = d_n + H;
#pragma omp simd
  for (int64_t j = 0; j < H; ++j) {
    const T d = carry[j] + grad_output[j];
    d_z[j] = d * (state[j] - n[j]) * z[j] * (1 - z[j]);
    d_n[j] = d * (1 - z[j]) * (1 - n[j] * n[j]);
    rh[j] = r[j] * state[j];
    carry[j] = d * z[j];
  }
}

template <class T>
FASTQT_INLINE void reset_before_backward_reset_body(const T* gates, const T* state,
                                                    const T* grad_reset_state, T* carry,
                                                    T* grad_gates, int64_t H) {
  const T* r = gates;
  T* d_r = grad_gates;
#pragma omp simd
  for (int64_t j = 0; j < H; ++j) {
    d_r[j] = grad_reset_state[j] * state[j] * r[j] * (1 - r[j]);
    carry[j] += grad_reset_state[j] * r[j];
  }
}

}  // namespace

FASTQT_CLONES void gru_reset_after_row(float* gates, const float* recurrent, const float* bias,
                                       const float* state, float* hidden_n, float* next,
                                       int64_t H) {
  reset_after_body(gates, recurrent, bias, state, hidden_n, next, H);
}
FASTQT_CLONES void gru_reset_after_row(double* gates, const double* recurrent, const double* bias,
                                       const double* state, double* hidden_n, double* next,
                                       int64_t H) {
  reset_after_body(gates, recurrent, bias, state, hidden_n, next, H);
}

FASTQT_CLONES void gru_reset_after_backward_row(const float* gates, const float* hidden_n,
                                                const float* state, const float* grad_output,
                                                float* carry, float* grad_gates, int64_t H) {
  reset_after_backward_body(gates, hidden_n, state, grad_output, carry, grad_gates, H);
}
FASTQT_CLONES void gru_reset_after_backward_row(const double* gates, const double* hidden_n,
                                                const double* state, const double* grad_output,
                                                double* carry, double* grad_gates, int64_t H) {
  reset_after_backward_body(gates, hidden_n, state, grad_output, carry, grad_gates, H);
}

FASTQT_CLONES void gru_reset_before_row(float* gates, const float* recurrent, const float* bias,
                                        const float* state, float* reset_state, int64_t H) {
  reset_before_body(gates, recurrent, bias, state, reset_state, H);
}
FASTQT_CLONES void gru_reset_before_row(double* gates, const double* recurrent, const double* bias,
                                        const double* state, double* reset_state, int64_t H) {
  reset_before_body(gates, recurrent, bias, state, reset_state, H);
}

FASTQT_CLONES void gru_reset_before_candidate_row(float* gates, const float* recurrent,
                                                  const float* bias, const float* state,
                                                  float* next, int64_t H) {
  reset_before_candidate_body(gates, recurrent, bias, state, next, H);
}
FASTQT_CLONES void gru_reset_before_candidate_row(double* gates, const double* recurrent,
                                                  const double* bias, const double* state,
                                                  double* next, int64_t H) {
  reset_before_candidate_body(gates, recurrent, bias, state, next, H);
}

FASTQT_CLONES void gru_reset_before_backward_row(const float* gates, const float* state,
                                                 const float* grad_output, float* carry,
                                                 float* grad_gates, int64_t H) {
  reset_before_backward_body(gates, state, grad_output, carry, grad_gates, H);
}
FASTQT_CLONES void gru_reset_before_backward_row(const double* gates, const double* state,
                                                 const double* grad_output, double* carry,
                                                 double* grad_gates, int64_t H) {
  reset_before_backward_body(gates, state, grad_output, carry, grad_gates, H);
}

FASTQT_CLONES void gru_reset_before_backward_reset_row(const float* gates, const float* state,
                                                       const float* grad_reset_state, float* carry,
                                                       float* grad_gates, int64_t H) {
  reset_before_backward_reset_body(gates, state, grad_reset_state, carry, grad_gates, H);
}
FASTQT_CLONES void gru_reset_before_backward_reset_row(const double* gates, const double* state,
                                                       const double* grad_reset_state,
                                                       double* carry, double* grad_gates,
                                                       int64_t H) {
  reset_before_backward_reset_body(gates, state, grad_reset_state, carry, grad_gates, H);
}

}  // namespace fastqt
