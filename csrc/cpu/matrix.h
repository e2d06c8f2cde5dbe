// Matrices as the walk over scores uses them: views of parts of them, matrix products, and access
// to their rows.
//
// These functions call libtorch's C functions and not its dispatcher, which takes longer than a
// small product.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace fastqt {

using torch::stable::Tensor;

// Rows or columns [begin, end).
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

template <class F>
void for_ranges(int64_t size, int64_t step, const F& visit) {
  for (int64_t begin = 0; begin < size; begin += step)
    visit(Range{begin, std::min(begin + step, size)});
}

// A view of the memory of a matrix with other sizes and strides, from `offset` elements after its
// first.
inline Tensor view(const Tensor& matrix, std::array<int64_t, 2> sizes,
                   std::array<int64_t, 2> strides, int64_t offset) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(matrix.get(), 2, sizes.data(), strides.data(), offset, &made));
  return Tensor(made);
}

inline Tensor part(const Tensor& matrix, int64_t dim, Range range) {
  if (range.size() == matrix.size(dim)) return matrix;
  std::array<int64_t, 2> sizes{matrix.size(0), matrix.size(1)};
  sizes[dim] = range.size();
  return view(matrix, sizes, {matrix.stride(0), matrix.stride(1)},
              range.begin * matrix.stride(dim));
}

inline Tensor transposed(const Tensor& matrix) {
  return view(matrix, {matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)}, 0);
}

inline int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// An uninitialised tensor.
template <std::size_t Rank>
Tensor new_tensor(std::array<int64_t, Rank> sizes, int32_t dtype) {
  std::array<int64_t, Rank> strides;
  int64_t stride = 1;
  for (std::size_t dim = Rank; dim-- > 0; stride *= sizes[dim]) strides[dim] = stride;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(Rank, sizes.data(), strides.data(), dtype,
                                                  aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// An uninitialised matrix of the dtype of `like`.
inline Tensor new_matrix(const Tensor& like, int64_t rows, int64_t columns) {
  return new_tensor<2>({rows, columns}, dtype_of(like));
}

// out = beta * out + alpha * a b
void multiply(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha);

// The matrix itself where the elements of a row are adjacent, else a contiguous copy.
inline Tensor with_adjacent_columns(const Tensor& matrix) {
  return matrix.stride(1) == 1 ? matrix : torch::stable::contiguous(matrix);
}

// The matrix itself where BLAS can read it in place, else a contiguous copy. Without it, each
// product would copy.
inline Tensor with_blas_layout(const Tensor& matrix) {
  const auto adjacent = [&](int64_t line, int64_t across) {
    return matrix.stride(across) == 1 && matrix.stride(line) >= matrix.size(across);
  };
  return adjacent(0, 1) || adjacent(1, 0) ? matrix : torch::stable::contiguous(matrix);
}

// The rows of a matrix with adjacent columns, for the functions of row_passes.h.
template <class T>
struct RowsOf {
  explicit RowsOf(const Tensor& matrix)
      : data(static_cast<T*>(matrix.data_ptr())), stride(matrix.stride(0)), width(matrix.size(1)) {}

  T* operator[](int64_t row) const { return data + row * stride; }

  T* data;
  int64_t stride, width;
};

// Asks Linux to back a new tensor by pages of 2 MiB. The first touch of each page costs a page
// fault, and larger pages are fewer. Linux does this by itself only where it is configured to.
inline void ask_for_large_pages([[maybe_unused]] const std::optional<Tensor>& tensor) {
#ifdef __linux__
  constexpr uintptr_t kLargePage = uintptr_t{1} << 21;
  if (!tensor) return;
  const auto first = reinterpret_cast<uintptr_t>(tensor->data_ptr());
  const uintptr_t begin = (first + kLargePage - 1) & ~(kLargePage - 1);
  const uintptr_t end =
      (first + tensor->numel() * static_cast<int64_t>(tensor->element_size())) & ~(kLargePage - 1);
  // A kernel without large pages refuses. The tensor is then used with small ones, so the result is
  // ignored.
  if (begin < end)
    static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#endif
}

}  // namespace fastqt
