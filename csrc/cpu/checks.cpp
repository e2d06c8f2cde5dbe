#include "cpu/checks.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <string>
#include <vector>

namespace fastqt {
namespace {

std::string name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Bool: return "bool";
    default: return torch::headeronly::toString(dtype);
  }
}

std::string written(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (std::size_t dim = 0; dim < shape.size(); ++dim)
    text += (dim > 0 ? ", " : "") +
            (shape[dim] == kAnySize ? "at least 1" : std::to_string(shape[dim]));
  return text + ")";
}

bool has_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  if (tensor.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t dim = 0;
  return std::all_of(shape.begin(), shape.end(), [&](int64_t wanted) {
    const int64_t size = tensor.size(dim++);
    return wanted == kAnySize ? size > 0 : size == wanted;
  });
}

}  // namespace

std::string described(const Tensor& tensor) {
  std::vector<int64_t> shape(tensor.dim());
  for (std::size_t dim = 0; dim < shape.size(); ++dim)
    shape[dim] = tensor.size(static_cast<int64_t>(dim));
  return std::string(tensor.is_contiguous() ? "a contiguous " : "a strided ") +
         name_of(tensor.scalar_type()) + " tensor of shape " + written(shape) +
         (tensor.is_cpu() ? "" : " on another device");
}

void check_tensor(const char* name, const Tensor& tensor, ScalarType dtype,
                  std::initializer_list<int64_t> shape, Layout layout) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == dtype && has_shape(tensor, shape) &&
                      (layout == Layout::kStrided || tensor.is_contiguous()),
                  name, ": want a ", layout == Layout::kStrided ? "" : "contiguous ",
                  name_of(dtype), " tensor of shape ", written(shape), " on the CPU, got ",
                  described(tensor));
}

void check_queries(const Tensor& queries, bool may_be_bfloat16) {
  const ScalarType dtype = queries.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double ||
                      (may_be_bfloat16 && dtype == ScalarType::BFloat16),
                  "queries: want dtype float32",
                  may_be_bfloat16 ? ", float64 or bfloat16" : " or float64", ", got ",
                  name_of(dtype));
  check_tensor("queries", queries, dtype, {kAnySize, kAnySize}, Layout::kStrided);
}

void check_kept_scores(const std::optional<Tensor>& scores, ScalarType dtype, int64_t rows,
                       int64_t width) {
  if (!scores) return;
  check_tensor("scores", *scores, dtype, {kAnySize, width}, Layout::kContiguous);
  STD_TORCH_CHECK(scores->size(0) <= rows, "scores: want at most ", rows, " rows, got ",
                  described(*scores));
}

void check_tile(int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(rows > 0, "tile_rows: want at least 1, got ", rows);
  STD_TORCH_CHECK(columns > 0, "tile_columns: want at least 1, got ", columns);
}

}  // namespace fastqt
