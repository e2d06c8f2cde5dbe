// Products with one matrix that stays the same over many steps of a recurrence.
//
// A GEMM first packs its right-hand matrix, which means to copy it into a layout of its own. For H
// = 1000 and a few hundred rows that is a fifth of its time. Where fastqt's own products are used,
// their panels are packed once for many products. So can MKL do, which the x86 builds of torch
// contain. Its functions are weak symbols here. Where they are missing too, pack_matrix returns an
// empty tensor, and the caller multiplies with torch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

#include "cpu/checks.h"
#include "cpu/own_products.h"

#if defined(__linux__) && defined(__x86_64__)
#define FASTQT_MKL 1
// As the manual of MKL declares them, with 32-bit integers and the values of its enumerations.
extern "C" {
__attribute__((weak)) void MKL_Get_Version_String(char*, int);
__attribute__((weak)) size_t cblas_sgemm_pack_get_size(int identifier, int m, int n, int k);
__attribute__((weak)) void cblas_sgemm_pack(int layout, int identifier, int trans, int m, int n,
                                            int k, float alpha, const float* src, int ld,
                                            float* dest);
__attribute__((weak)) void cblas_sgemm_compute(int layout, int transa, int transb, int m, int n,
                                               int k, const float* a, int lda, const float* b,
                                               int ldb, float beta, float* c, int ldc);
}
#endif

namespace fastqt {
namespace {

enum Blas : int {
  kRowMajor = 101,
  kNoTrans = 111,
  kTrans = 112,
  kPacked = 151,
  kRightMatrix = 162
};

constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
constexpr int64_t kHeader =
    16;  // floats before the data of MKL: 64 bytes, which keeps the data aligned

// True only for MKL: OpenBLAS has functions of the same names, but may not accept another number of
// rows later.
bool available() {
#ifdef FASTQT_MKL
  return MKL_Get_Version_String && cblas_sgemm_pack_get_size && cblas_sgemm_pack &&
         cblas_sgemm_compute;
#else
  return false;
#endif
}

// The pointer and the leading dimension that a GEMM takes of a float32 CPU matrix in which the
// elements of a line are adjacent. The lines are the rows (0) or the columns (1).
struct Lines {
  Lines(const Tensor& tensor, int lines) {
    if (tensor.dim() != 2 || !tensor.is_cpu() || tensor.scalar_type() != ScalarType::Float ||
        tensor.numel() == 0) {
      return;
    }
    const int64_t count = tensor.size(lines), length = tensor.size(1 - lines);
    // Where there is one line its stride is arbitrary, and may be less than its length.
    const int64_t distance = count == 1 ? length : tensor.stride(lines);
    valid = (length == 1 || tensor.stride(1 - lines) == 1) && distance >= length &&
            std::max(count, distance) <= kMaxInt;
    leading = static_cast<int>(distance);
    data = static_cast<float*>(tensor.data_ptr());
  }

  bool valid = false;
  int leading = 0;
  float* data = nullptr;
};

// What the header of a packed matrix holds. A copy at another address is invalid, since MKL depends
// on the alignment, and so is the packed form of a matrix of another shape, or for other products.
struct Packing {
  const void* address;
  int64_t K, N;
  Vectors level;  // of the own products; kNone stands for MKL's

  bool operator==(const Packing&) const = default;
};
static_assert(sizeof(Packing) <= kHeader * sizeof(float));

// Whether `packed` is what pack_matrix has made of a matrix (K, N), and still is where it was made.
bool is_packing_of(const Tensor& packed, int64_t K, int64_t N, Vectors level) {
  if (!packed.is_cpu() || packed.scalar_type() != ScalarType::Float || packed.numel() <= kHeader)
    return false;
  Packing header;
  std::memcpy(&header, packed.data_ptr(), sizeof(header));
  return packed.is_contiguous() && header == Packing{packed.data_ptr(), K, N, level};
}

// What a packed matrix is multiplied by.
Vectors level_of(bool bfloat16) {
  const Vectors rounded = bfloat16 ? own_bfloat16_products() : Vectors::kNone;
  return rounded == Vectors::kNone ? own_products() : rounded;
}

// The packed form of `matrix` (K, N), for left factors of at most `rows` rows. It is empty where
// nothing here can pack, or not this matrix. With `bfloat16`, both factors are rounded to it where
// this processor multiplies such.
Tensor pack_matrix(Tensor matrix, int64_t rows, bool bfloat16) {
  const Lines by_rows(matrix, 0), by_columns(matrix, 1);
  const Vectors level = level_of(bfloat16);
  const bool own = level != Vectors::kNone;
  const bool packs =
      (own || available()) && (by_rows.valid || by_columns.valid) && rows > 0 && rows <= kMaxInt;

  int64_t elements = 0;
  if (packs) {
    int64_t bytes = 0;
    if (own) bytes = packed_bytes(matrix.size(0), matrix.size(1), level);
#ifdef FASTQT_MKL
    else bytes = cblas_sgemm_pack_get_size(kRightMatrix, rows, matrix.size(1), matrix.size(0));
#endif
    elements = kHeader + (bytes + static_cast<int64_t>(sizeof(float)) - 1) /
                             static_cast<int64_t>(sizeof(float));
  }

  Tensor packed = torch::stable::new_empty(matrix, {&elements, 1});
  if (!packs) return packed;
  float* const data = static_cast<float*>(packed.data_ptr());
  const Packing header{data, matrix.size(0), matrix.size(1), level};
  std::memcpy(data, &header, sizeof(header));
  if (own) {
    auto* const panels = reinterpret_cast<std::byte*>(data + kHeader);
    pack_columns(strided(matrix), matrix.size(0), matrix.size(1), panels, level);
    return packed;
  }
#ifdef FASTQT_MKL
  const Lines& lines = by_rows.valid ? by_rows : by_columns;
  cblas_sgemm_pack(kRowMajor, kRightMatrix, by_rows.valid ? kNoTrans : kTrans, rows, matrix.size(1),
                   matrix.size(0), 1.0f, lines.data, lines.leading, data + kHeader);
#endif
  return packed;
}

// out (b, N) = left (b, K) · matrix (K, N), plus `out` if `accumulate`.
void packed_product(Tensor out, Tensor left, Tensor matrix, Tensor packed, bool accumulate,
                    bool bfloat16) {
  const Lines to(out, 0), from(left, 0);
  STD_TORCH_CHECK(
      to.valid && from.valid && matrix.dim() == 2 && out.size(0) == left.size(0) &&
          left.size(1) == matrix.size(0) && out.size(1) == matrix.size(1),
      "out, left: want float32 matrices on the CPU of fitting shapes, with adjacent columns, got ",
      described(out), " and ", described(left));
  const Vectors level = level_of(bfloat16);
  if (!is_packing_of(packed, matrix.size(0), matrix.size(1), level))
    packed = pack_matrix(matrix, left.size(0), bfloat16);
  STD_TORCH_CHECK(packed.numel() > 0, "matrix: cannot be packed here");
  if (level != Vectors::kNone) {
    const auto* const panels =
        reinterpret_cast<const std::byte*>(static_cast<float*>(packed.data_ptr()) + kHeader);
    own_multiply(out, left, matrix, accumulate, 1, level, panels);
    return;
  }
#ifdef FASTQT_MKL
  cblas_sgemm_compute(kRowMajor, kNoTrans, kPacked, out.size(0), out.size(1), left.size(1),
                      from.data, from.leading,
                      static_cast<const float*>(packed.data_ptr()) + kHeader, out.size(1),
                      accumulate ? 1.0f : 0.0f, to.data, to.leading);
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def("pack_matrix(Tensor matrix, int rows, bool bfloat16=False) -> Tensor");
  m.def(
      "packed_product_(Tensor(a!) out, Tensor left, Tensor matrix, Tensor packed, bool accumulate, "
      "bool bfloat16=False) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("pack_matrix", TORCH_BOX(&pack_matrix));
  m.impl("packed_product_", TORCH_BOX(&packed_product));
}

}  // namespace fastqt
