#include "cpu/problem.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <functional>

#include "cpu/checks.h"

namespace fastqt {
namespace {

void check_embeddings(const Problem& p, ScalarType dtype) {
  const int64_t N = p.rows(), M = p.candidates.size(0), D = p.queries.size(1);
  check_tensor("negatives", p.negatives, dtype, {kAnySize, D}, Layout::kStrided);
  check_tensor("row_negatives", p.row_negatives, dtype, {N, D}, Layout::kStrided);
  check_tensor("bias", p.bias, computed_dtype(dtype), {M}, Layout::kContiguous);
  check_tensor("row_scores", p.row_scores, computed_dtype(dtype), {N}, Layout::kContiguous);
}

void check_compressed_targets(const Problem& p) {
  const int64_t N = p.rows();
  STD_TORCH_CHECK(p.columns && p.weights, p.columns ? "weights" : "columns",
                  ": want it with starts, got None");
  check_tensor("starts", p.starts, ScalarType::Long, {N + 1}, Layout::kContiguous);
  STD_TORCH_CHECK(p.columns->dim() == 1, "columns: want 1 dimension, got ", p.columns->dim());
  const int64_t entries = p.columns->size(0);
  check_tensor("columns", p.columns, ScalarType::Long, {entries}, Layout::kContiguous);
  check_tensor("weights", p.weights, ScalarType::Double, {entries}, Layout::kContiguous);
  const int64_t* const first = p.starts->const_data_ptr<int64_t>();
  STD_TORCH_CHECK(first[0] >= 0 && first[N] <= entries, "starts: want numbers of the ", entries,
                  " columns, got ", first[0], " first and ", first[N], " last");
  const int64_t* const falls = std::adjacent_find(first, first + N + 1, std::greater<>());
  STD_TORCH_CHECK(falls == first + N + 1, "starts: want numbers that do not decrease, got ",
                  falls[0], " and then ", falls[1], " at row ", falls - first);
}

void check_targets(const Problem& p, ScalarType dtype) {
  const int64_t N = p.rows(), M = p.candidates.size(0);
  STD_TORCH_CHECK(p.starts.has_value() != p.dense.has_value(),
                  "starts: want either starts or dense, got ", p.dense ? "both" : "neither");
  if (p.starts) check_compressed_targets(p);
  STD_TORCH_CHECK(!p.dense || dtype != ScalarType::BFloat16,
                  "dense: want None with bfloat16 embeddings, got ", described(*p.dense));
  check_tensor("dense", p.dense, dtype, {N, M}, Layout::kStrided);
  check_tensor("background", p.background, ScalarType::Double, {N}, Layout::kContiguous);
}

void check_exclusions(const Problem& p) {
  const int64_t N = p.rows(), M = p.candidates.size(0);
  STD_TORCH_CHECK(p.query_groups.has_value() == p.candidate_groups.has_value(),
                  p.query_groups ? "candidate_groups" : "query_groups",
                  ": want it with the other groups, got None");
  check_tensor("query_groups", p.query_groups, ScalarType::Long, {N}, Layout::kContiguous);
  check_tensor("candidate_groups", p.candidate_groups, ScalarType::Long, {M}, Layout::kContiguous);
  check_tensor("mask", p.mask, ScalarType::Bool, {N, M}, Layout::kStrided);
  check_tensor("thresholds", p.thresholds, computed_dtype(p.queries.scalar_type()), {N},
               Layout::kContiguous);
}

template <class T>
const T* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

int64_t stride(const std::optional<Tensor>& tensor, int64_t dim) {
  return tensor ? tensor->stride(dim) : 0;
}

}  // namespace

void check(const Problem& p) {
  STD_TORCH_CHECK(p.link == kSoftmax || p.link == kSigmoid || p.link == kLogSumExp,
                  "link: want 0 (softmax), 1 (sigmoid) or 2 (logsumexp), got ", p.link);
  STD_TORCH_CHECK(p.diagonal == kZero || p.diagonal == kExclude || p.diagonal == kKeep,
                  "diagonal: want 0 (zero), 1 (exclude) or 2 (keep), got ", p.diagonal);
  check_queries(p.queries, true);
  const ScalarType dtype = p.queries.scalar_type();
  check_tensor("candidates", p.candidates, dtype, {kAnySize, p.queries.size(1)}, Layout::kStrided);
  check_embeddings(p, dtype);
  check_targets(p, dtype);
  check_exclusions(p);
}

template <class T>
Cells<T> cells_of(const Problem& p, const Gradients& gradients) {
  return {p.candidates.size(0),
          p.diagonal,
          pointer<T>(p.bias),
          pointer<int64_t>(p.starts),
          pointer<int64_t>(p.columns),
          pointer<double>(p.weights),
          pointer<T>(p.dense),
          stride(p.dense, 0),
          stride(p.dense, 1),
          pointer<double>(p.background),
          pointer<int64_t>(p.query_groups),
          pointer<int64_t>(p.candidate_groups),
          pointer<bool>(p.mask),
          stride(p.mask, 0),
          stride(p.mask, 1),
          pointer<T>(p.thresholds),
          static_cast<T>(p.scale),
          pointer<T>(p.row_scores),
          gradients.row_scores ? gradients.row_scores->template mutable_data_ptr<T>() : nullptr};
}

template Cells<float> cells_of(const Problem&, const Gradients&);
template Cells<double> cells_of(const Problem&, const Gradients&);

}  // namespace fastqt
