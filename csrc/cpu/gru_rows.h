// Vectorised passes of a GRU step over one row: the gates of one sentence, for its H hidden units.
//
// `gates` and `recurrent` hold blocks of H columns in the order r, z, n of torch. `bias` (4, H) has
// one row for each of r, z, n and one for the n block of U h. `next` may be the same memory as
// `state`. `carry` holds the gradient of the new state that comes from later steps, and is replaced
// by its direct share of the gradient of the old state; `grad_output` is the gradient of the new
// state that comes from elsewhere.
#pragma once

#include <cstdint>

namespace fastqt {

// gates (3H) in: W x; out: r, z, n. recurrent (3H): U h. hidden_n out: the n block of U h + bias.
void gru_reset_after_row(float* gates, const float* recurrent, const float* bias,
                         const float* state, float* hidden_n, float* next, int64_t H);
void gru_reset_after_row(double* gates, const double* recurrent, const double* bias,
                         const double* state, double* hidden_n, double* next, int64_t H);

// grad_gates (4H) out: of n, r, z, hidden_n before their activations.
void gru_reset_after_backward_row(const float* gates, const float* hidden_n, const float* state,
                                  const float* grad_output, float* carry, float* grad_gates,
                                  int64_t H);
void gru_reset_after_backward_row(const double* gates, const double* hidden_n, const double* state,
                                  const double* grad_output, double* carry, double* grad_gates,
                                  int64_t H);

// gates (3H) in: W x; out: r, z, and an unchanged W x of n. recurrent (2H): U h of r, z.
// reset_state out: r * h.
void gru_reset_before_row(float* gates, const float* recurrent, const float* bias,
                          const float* state, float* reset_state, int64_t H);
void gru_reset_before_row(double* gates, const double* recurrent, const double* bias,
                          const double* state, double* reset_state, int64_t H);

// gates (3H) in: r, z, and W x of n; out: r, z, n. recurrent (H): U (r * h).
void gru_reset_before_candidate_row(float* gates, const float* recurrent, const float* bias,
                                    const float* state, float* next, int64_t H);
void gru_reset_before_candidate_row(double* gates, const double* recurrent, const double* bias,
                                    const double* state, double* next, int64_t H);

// grad_gates (4H) out: of z, n in blocks 1, 2; and r * h in block 3.
void gru_reset_before_backward_row(const float* gates, const float* state, const float* grad_output,
                                   float* carry, float* grad_gates, int64_t H);
void gru_reset_before_backward_row(const double* gates, const double* state,
                                   const double* grad_output, double* carry, double* grad_gates,
                                   int64_t H);

// grad_gates (4H) out: of r in block 0. r * grad_reset_state is added to carry.
void gru_reset_before_backward_reset_row(const float* gates, const float* state,
                                         const float* grad_reset_state, float* carry,
                                         float* grad_gates, int64_t H);
void gru_reset_before_backward_reset_row(const double* gates, const double* state,
                                         const double* grad_reset_state, double* carry,
                                         double* grad_gates, int64_t H);

}  // namespace fastqt
