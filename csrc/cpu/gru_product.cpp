// Products with one matrix that stays the same over many steps of a recurrence.
//
// A GEMM first copies its right-hand matrix into a layout of its own: for H = 1000 and a
// few hundred rows that is a fifth of its time. MKL, which torch's x86 builds contain,
// offers to do it once. Its functions are weak symbols here: where they are missing the
// operators say so by packing nothing, and the caller multiplies as usual.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <limits>

#if defined(__linux__) && defined(__x86_64__)
#define FASTQT_MKL 1
// As declared in MKL's manual, with its 32-bit integers and its values of enumerations.
extern "C" {
__attribute__((weak)) void MKL_Get_Version_String(char*, int);
__attribute__((weak)) size_t cblas_sgemm_pack_get_size(int identifier, int m, int n, int k);
__attribute__((weak)) void cblas_sgemm_pack(
    int layout, int identifier, int trans, int m, int n, int k, float alpha, const float* src, int ld, float* dest);
__attribute__((weak)) void cblas_sgemm_compute(
    int layout, int transa, int transb, int m, int n, int k, const float* a, int lda, const float* b, int ldb,
    float beta, float* c, int ldc);
}
#endif

namespace fastqt {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum Blas : int { kRowMajor = 101, kNoTrans = 111, kTrans = 112, kPacked = 151, kRightMatrix = 162 };

// OpenBLAS has functions of the same names, which may not let the number of rows vary.
bool available() {
#ifdef FASTQT_MKL
  return MKL_Get_Version_String && cblas_sgemm_pack_get_size && cblas_sgemm_pack && cblas_sgemm_compute;
#else
  return false;
#endif
}

bool is_float_matrix(const Tensor& tensor) {
  return tensor.dim() == 2 && tensor.is_cpu() && tensor.scalar_type() == ScalarType::Float &&
      tensor.size(0) > 0 && tensor.size(1) > 0;
}

bool fits_int(const Tensor& matrix) {
  constexpr int64_t max = std::numeric_limits<int>::max();
  return matrix.size(0) <= max && matrix.size(1) <= max && matrix.stride(0) <= max && matrix.stride(1) <= max;
}

// The packed form of `matrix` (K, N), for left factors of about `rows` rows; no elements
// where this BLAS or this matrix does not offer one.
Tensor pack_matrix(Tensor matrix, int64_t rows) {
  const bool transposed = matrix.dim() == 2 && matrix.stride(1) != 1;
  size_t bytes = 0;
#ifdef FASTQT_MKL
  if (available() && is_float_matrix(matrix) && fits_int(matrix) && matrix.stride(transposed ? 0 : 1) == 1) {
    bytes = cblas_sgemm_pack_get_size(kRightMatrix, rows, matrix.size(1), matrix.size(0));
  }
#endif
  const int64_t size[] = {static_cast<int64_t>((bytes + sizeof(float) - 1) / sizeof(float))};
  Tensor packed = torch::stable::new_empty(matrix, {size, 1});
#ifdef FASTQT_MKL
  if (bytes > 0) {
    cblas_sgemm_pack(
        kRowMajor, kRightMatrix, transposed ? kTrans : kNoTrans, rows, matrix.size(1), matrix.size(0), 1.0f,
        static_cast<const float*>(matrix.data_ptr()), matrix.stride(transposed ? 1 : 0),
        static_cast<float*>(packed.data_ptr()));
  }
#endif
  return packed;
}

// out (b, N) = left (b, K) · the packed matrix, plus `out` if `accumulate`.
void packed_product(Tensor out, Tensor left, Tensor packed, bool accumulate) {
  STD_TORCH_CHECK(available() && packed.numel() > 0, "packed: expected what pack_matrix made, got nothing");
  STD_TORCH_CHECK(
      is_float_matrix(out) && is_float_matrix(left) && out.size(0) == left.size(0) && out.stride(1) == 1 &&
          left.stride(1) == 1 && fits_int(out) && fits_int(left),
      "out, left: expected float32 CPU matrices of the same number of rows, with adjacent columns");
#ifdef FASTQT_MKL
  cblas_sgemm_compute(
      kRowMajor, kNoTrans, kPacked, out.size(0), out.size(1), left.size(1),
      static_cast<const float*>(left.data_ptr()), left.stride(0), static_cast<const float*>(packed.data_ptr()),
      out.size(1), accumulate ? 1.0f : 0.0f, static_cast<float*>(out.data_ptr()), out.stride(0));
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def("pack_matrix(Tensor matrix, int rows) -> Tensor");
  m.def("packed_product_(Tensor(a!) out, Tensor left, Tensor packed, bool accumulate) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("pack_matrix", TORCH_BOX(&pack_matrix));
  m.impl("packed_product_", TORCH_BOX(&packed_product));
}

}  // namespace fastqt
