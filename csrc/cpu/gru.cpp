// The elementwise half of a GRU step, one pass over the rows of the active sentences.
//
// There are b rows and H hidden units. `gates` holds blocks of H columns in the order r, z, n of
// torch. `bias` (4, H) has one row for each of r, z, n and one for the n block of U h. Where
// `recurrent` has fewer than b rows, the other sentences start from a zero state. `hidden_n` and
// `output` without rows are not written; `grad_output` without rows is zero. The new state of row i
// goes to row i of `next` if there is one, and else to row i of `final`; `next` may be the same
// memory as `state`. `carry` holds the gradient of the new state that comes from later steps, and
// is replaced by its direct share of the gradient of the old state. fastqt/nn/gru/gates.py computes
// the same with torch operators.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <vector>

#include "cpu/checks.h"
#include "cpu/gru_rows.h"
#include "cpu/matrix.h"

namespace fastqt {
namespace {

// The least number of elements for which one more thread pays.
constexpr int64_t kGrain = 8192;

// A contiguous matrix on the CPU. `spare` stands for a row that an optional matrix does not have.
template <class T>
class Matrix {
 public:
  Matrix(const Tensor& tensor, const char* name, int64_t rows, int64_t columns)
      : data_(static_cast<T*>(tensor.data_ptr())), rows_(tensor.size(0)), columns_(columns) {
    constexpr ScalarType dtype = std::is_same_v<T, float> ? ScalarType::Float : ScalarType::Double;
    STD_TORCH_CHECK(tensor.dim() == 2 && rows_ >= rows && tensor.size(1) == columns &&
                        tensor.is_contiguous() && tensor.is_cpu() && tensor.scalar_type() == dtype,
                    name, ": want a contiguous matrix on the CPU of at least ", rows, " rows and ",
                    columns, " columns, of one dtype with gates, got ", described(tensor));
  }

  int64_t rows() const { return rows_; }
  T* row(int64_t i) const { return data_ + i * columns_; }
  T* row(int64_t i, std::vector<T>& spare) const { return i < rows_ ? row(i) : spare.data(); }

 private:
  T* data_;
  int64_t rows_, columns_;
};

template <class T>
Matrix<T> optional(const Tensor& tensor, const char* name, int64_t rows, int64_t columns) {
  return Matrix<T>(tensor, name, tensor.size(0) > 0 ? rows : 0, columns);
}

// The matrices that new states are written to.
template <class T>
struct Destination {
  Matrix<T> next, final, output;

  T* row(int64_t i) const { return i < next.rows() ? next.row(i) : final.row(i); }
  void copy_to_output(int64_t i, int64_t H) const {
    if (output.rows() > 0) {
      std::copy_n(row(i), H, output.row(i));
    }
  }
};

template <class T>
Destination<T> destination(const Tensor& next, const Tensor& final, const Tensor& output,
                           int64_t rows, int64_t H) {
  return {{next, "next", 0, H}, {final, "final", rows, H}, optional<T>(output, "output", rows, H)};
}

template <class Rows>
void parallel_rows(int64_t rows, int64_t H, const Rows& body) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, H)),
                              body);
}

// Calls body(T{}) with the dtype of `gates` for T.
template <class Body>
void dispatch(const Tensor& gates, const Body& body) {
  if (gates.scalar_type() == ScalarType::Double) {
    body(double{});
  } else {
    body(float{});
  }
}

void reset_after(Tensor gates,      // (b, 3H) in: W x; out: r, z, n
                 Tensor recurrent,  // (<= b, 3H) U h
                 Tensor bias,
                 Tensor state,     // (b, H) h
                 Tensor hidden_n,  // (b, H) out: the n block of U h + bias
                 Tensor next,      // (_, H)
                 Tensor final,     // (>= b, H)
                 Tensor output) {  // (b, H)
  const int64_t b = gates.size(0), H = state.size(1);
  dispatch(gates, [&](auto type) {
    using T = decltype(type);
    const Matrix<T> gate_rows(gates, "gates", b, 3 * H),
        recurrent_rows(recurrent, "recurrent", 0, 3 * H), biases(bias, "bias", 4, H),
        states(state, "state", b, H);
    const Matrix<T> hidden_n_rows = optional<T>(hidden_n, "hidden_n", b, H);
    const Destination<T> to = destination<T>(next, final, output, b, H);
    parallel_rows(b, H, [&](int64_t begin, int64_t end) {
      std::vector<T> zeros(3 * H), discarded(H);
      for (int64_t i = begin; i < end; ++i) {
        gru_reset_after_row(gate_rows.row(i), recurrent_rows.row(i, zeros), biases.row(0),
                            states.row(i), hidden_n_rows.row(i, discarded), to.row(i), H);
        to.copy_to_output(i, H);
      }
    });
  });
}

void reset_after_backward(
    Tensor gates,         // (b, 3H)
    Tensor hidden_n,      // (b, H)
    Tensor state,         // (b, H)
    Tensor grad_output,   // (b, H)
    Tensor carry,         // (>= b, H)
    Tensor grad_gates) {  // (b, 4H) out: of n, r, z, hidden_n before their activations
  const int64_t b = gates.size(0), H = state.size(1);
  dispatch(gates, [&](auto type) {
    using T = decltype(type);
    const Matrix<T> gate_rows(gates, "gates", b, 3 * H), hidden_n_rows(hidden_n, "hidden_n", b, H),
        states(state, "state", b, H), carries(carry, "carry", b, H),
        grad_gate_rows(grad_gates, "grad_gates", b, 4 * H);
    const Matrix<T> grad_outputs = optional<T>(grad_output, "grad_output", b, H);
    parallel_rows(b, H, [&](int64_t begin, int64_t end) {
      std::vector<T> zeros(H);
      for (int64_t i = begin; i < end; ++i) {
        gru_reset_after_backward_row(gate_rows.row(i), hidden_n_rows.row(i), states.row(i),
                                     grad_outputs.row(i, zeros), carries.row(i),
                                     grad_gate_rows.row(i), H);
      }
    });
  });
}

void reset_before(Tensor gates,      // (b, 3H) in: W x; out: r, z, and an unchanged W x of n
                  Tensor recurrent,  // (<= b, 2H) U h of r, z
                  Tensor bias,
                  Tensor state,          // (b, H)
                  Tensor reset_state) {  // (b, H) out: r * h
  const int64_t b = gates.size(0), H = state.size(1);
  dispatch(gates, [&](auto type) {
    using T = decltype(type);
    const Matrix<T> gate_rows(gates, "gates", b, 3 * H),
        recurrent_rows(recurrent, "recurrent", 0, 2 * H), biases(bias, "bias", 4, H),
        states(state, "state", b, H), reset_states(reset_state, "reset_state", b, H);
    parallel_rows(b, H, [&](int64_t begin, int64_t end) {
      std::vector<T> zeros(2 * H);
      for (int64_t i = begin; i < end; ++i) {
        gru_reset_before_row(gate_rows.row(i), recurrent_rows.row(i, zeros), biases.row(0),
                             states.row(i), reset_states.row(i), H);
      }
    });
  });
}

void reset_before_candidate(Tensor gates,      // (b, 3H) in: r, z, and W x of n; out: r, z, n
                            Tensor recurrent,  // (<= b, H) U (r * h)
                            Tensor bias,
                            Tensor state,     // (b, H)
                            Tensor next,      // (_, H)
                            Tensor final,     // (>= b, H)
                            Tensor output) {  // (b, H)
  const int64_t b = gates.size(0), H = state.size(1);
  dispatch(gates, [&](auto type) {
    using T = decltype(type);
    const Matrix<T> gate_rows(gates, "gates", b, 3 * H),
        recurrent_rows(recurrent, "recurrent", 0, H), biases(bias, "bias", 4, H),
        states(state, "state", b, H);
    const Destination<T> to = destination<T>(next, final, output, b, H);
    parallel_rows(b, H, [&](int64_t begin, int64_t end) {
      std::vector<T> zeros(H);
      for (int64_t i = begin; i < end; ++i) {
        gru_reset_before_candidate_row(gate_rows.row(i), recurrent_rows.row(i, zeros),
                                       biases.row(0), states.row(i), to.row(i), H);
        to.copy_to_output(i, H);
      }
    });
  });
}

void reset_before_backward(
    Tensor gates,         // (b, 3H)
    Tensor state,         // (b, H)
    Tensor grad_output,   // (b, H)
    Tensor carry,         // (>= b, H)
    Tensor grad_gates) {  // (b, 4H) out: of z, n in blocks 1, 2; and r * h in block 3
  const int64_t b = gates.size(0), H = state.size(1);
  dispatch(gates, [&](auto type) {
    using T = decltype(type);
    const Matrix<T> gate_rows(gates, "gates", b, 3 * H), states(state, "state", b, H),
        carries(carry, "carry", b, H), grad_gate_rows(grad_gates, "grad_gates", b, 4 * H);
    const Matrix<T> grad_outputs = optional<T>(grad_output, "grad_output", b, H);
    parallel_rows(b, H, [&](int64_t begin, int64_t end) {
      std::vector<T> zeros(H);
      for (int64_t i = begin; i < end; ++i) {
        gru_reset_before_backward_row(gate_rows.row(i), states.row(i), grad_outputs.row(i, zeros),
                                      carries.row(i), grad_gate_rows.row(i), H);
      }
    });
  });
}

void reset_before_backward_reset(
    Tensor gates,             // (b, 3H)
    Tensor state,             // (b, H)
    Tensor grad_reset_state,  // (<= b, H): the other rows have a zero state
    Tensor carry,             // (>= b, H) out: r * grad_reset_state is added
    Tensor grad_gates) {      // (b, 4H) out: of r in block 0
  const int64_t b = gates.size(0), H = state.size(1);
  dispatch(gates, [&](auto type) {
    using T = decltype(type);
    const Matrix<T> gate_rows(gates, "gates", b, 3 * H), states(state, "state", b, H),
        carries(carry, "carry", b, H),
        grad_reset_states(grad_reset_state, "grad_reset_state", 0, H),
        grad_gate_rows(grad_gates, "grad_gates", b, 4 * H);
    parallel_rows(b, H, [&](int64_t begin, int64_t end) {
      std::vector<T> zeros(H);
      for (int64_t i = begin; i < end; ++i) {
        gru_reset_before_backward_reset_row(gate_rows.row(i), states.row(i),
                                            grad_reset_states.row(i, zeros), carries.row(i),
                                            grad_gate_rows.row(i), H);
      }
    });
  });
}

// What a layer keeps of all words is new memory in each call, and its page faults would take as
// long as the gates.
void large_pages(Tensor tensor) { ask_for_large_pages(tensor); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def("ask_for_large_pages_(Tensor(a!) tensor) -> ()");
  m.def(
      "gru_reset_after_(Tensor(a!) gates, Tensor recurrent, Tensor bias, Tensor state, Tensor(b!) "
      "hidden_n, "
      "Tensor(c!) next, Tensor(d!) final, Tensor(e!) output) -> ()");
  m.def(
      "gru_reset_after_backward_(Tensor gates, Tensor hidden_n, Tensor state, Tensor grad_output, "
      "Tensor(a!) carry, Tensor(b!) grad_gates) -> ()");
  m.def(
      "gru_reset_before_(Tensor(a!) gates, Tensor recurrent, Tensor bias, Tensor state, "
      "Tensor(b!) reset_state) -> ()");
  m.def(
      "gru_reset_before_candidate_(Tensor(a!) gates, Tensor recurrent, Tensor bias, Tensor state, "
      "Tensor(b!) next, Tensor(c!) final, Tensor(d!) output) -> ()");
  m.def(
      "gru_reset_before_backward_(Tensor gates, Tensor state, Tensor grad_output, Tensor(a!) "
      "carry, "
      "Tensor(b!) grad_gates) -> ()");
  m.def(
      "gru_reset_before_backward_reset_(Tensor gates, Tensor state, Tensor grad_reset_state, "
      "Tensor(a!) carry, Tensor(b!) grad_gates) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("ask_for_large_pages_", TORCH_BOX(&large_pages));
  m.impl("gru_reset_after_", TORCH_BOX(&reset_after));
  m.impl("gru_reset_after_backward_", TORCH_BOX(&reset_after_backward));
  m.impl("gru_reset_before_", TORCH_BOX(&reset_before));
  m.impl("gru_reset_before_candidate_", TORCH_BOX(&reset_before_candidate));
  m.impl("gru_reset_before_backward_", TORCH_BOX(&reset_before_backward));
  m.impl("gru_reset_before_backward_reset_", TORCH_BOX(&reset_before_backward_reset));
}

}  // namespace fastqt
