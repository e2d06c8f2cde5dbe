// The operators of the GRU, with matrices of all fitting shapes and with malformed ones. Tame
// states stay finite.
#include "operators.h"

namespace fuzz {
namespace {

// The matrices of a step: b active sentences, H hidden units.
class Step {
 public:
  explicit Step(Source& source)
      : source_(source), b_(source.between(0, 9)), H_(source.between(0, 70)),
        dtype_(source.dtype()) {}

  void run() {
    const Tensor bias = matrix(4, H_), state = matrix(b_, H_), gates = matrix(b_, 3 * H_);
    const Tensor output = maybe(H_), final = matrix(b_ + source_.between(0, 2), H_);
    // The operators allow `next` to be the state itself.
    const Tensor next = source_.flag() ? state : matrix(source_.between(0, b_), H_);
    const Tensor carry = matrix(b_ + source_.between(0, 2), H_), grad_gates = matrix(b_, 4 * H_);
    switch (source_.between(0, 5)) {
      case 0:
        return step("gru_reset_after_",
                    {gates, live(3), bias, state, maybe(H_), next, final, output}, final);
      case 1:
        return step("gru_reset_after_backward_",
                    {gates, matrix(b_, H_), state, maybe(H_), carry, grad_gates}, carry);
      case 2:
        return step("gru_reset_before_", {gates, live(2), bias, state, matrix(b_, H_)}, gates);
      case 3:
        return step("gru_reset_before_candidate_",
                    {gates, live(1), bias, state, next, final, output}, final);
      case 4:
        return step("gru_reset_before_backward_", {gates, state, maybe(H_), carry, grad_gates},
                    carry);
      default:
        return step("gru_reset_before_backward_reset_", {gates, state, live(1), carry, grad_gates},
                    carry);
    }
  }

 private:
  Tensor matrix(int64_t rows, int64_t columns) {
    return source_.contiguous({rows, columns}, dtype_);
  }
  Tensor maybe(int64_t columns) { return matrix(source_.flag() ? b_ : 0, columns); }
  Tensor live(int64_t blocks) { return matrix(source_.between(0, b_), blocks * H_); }

  void step(const char* name, Stack arguments, const Tensor& written) {
    if (call(name, std::move(arguments), source_.tame) && source_.tame)
      require_finite(written, name);
  }

  Source& source_;
  const int64_t b_, H_;
  const at::ScalarType dtype_;
};

// A product with a packed matrix, which may be of another shape, a copy, or no packed matrix at
// all.
void product(Source& source) {
  const int64_t b = source.size(9), K = source.size(40), N = source.size(40);
  const Tensor left = source.contiguous({b, K}, at::kFloat),
               matrix = source.tensor({K, N}, at::kFloat);
  const Tensor out = source.contiguous({b, N}, at::kFloat);
  const bool accumulate = source.flag(), bfloat16 = source.flag();
  const Tensor expected =
      source.tame ? (accumulate ? out + left.matmul(matrix) : left.matmul(matrix)) : Tensor();
  const int64_t rows = source.wild() ? source.any_integer() : b;
  const bool expanded = matrix.dim() == 2 && matrix.stride(0) == 0;
  const bool packs = source.tame && !expanded;
  const Tensor packed_matrix = source.flag() ? matrix : source.tensor({K + 1, 5}, at::kFloat);
  const auto packing = call("pack_matrix", {packed_matrix, rows, bfloat16}, source.tame);
  if (!packing) return;
  Tensor packed = (*packing)[0].toTensor();
  if (packed.numel() == 0 && source.tame) return;  // a BLAS or a layout that cannot be packed
  if (source.flag()) packed = packed.clone();
  if (source.wild()) packed = source.contiguous({source.between(0, 40)}, at::kFloat);
  const bool fits =
      packs && (matrix.stride(0) == 1 || matrix.stride(1) == 1) && matrix.storage_offset() == 0;
  if (!call("packed_product_", {out, left, matrix, packed, accumulate, bfloat16}, false)) {
    require(!fits || matrix.size(0) == 1 || matrix.size(1) == 1, "a product that is refused");
    return;
  }
  const at::ScalarType factors = bfloat16 ? at::kBFloat16 : at::kFloat;
  if (source.tame) require_close(out, expected, factors, "a product that is wrong");
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  fuzz::Source source(data, size);
  if (source.flag()) {
    fuzz::Step(source).run();
  } else {
    fuzz::product(source);
  }
  return 0;
}
