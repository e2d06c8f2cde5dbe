// The operator that launches the one-launch kernel, on the current stream and without waiting for
// it.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "cuda/runtime.h"
#include "cuda/small_kernel.cuh"

namespace fastqt::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// How many blocks of a kernel a device runs at once, which is as many as may wait for each other.
template <class P>
int blocks_at_once(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto entry = known.find(device); entry != known.end()) return entry->second;

  int cooperative = 0, multiprocessors = 0, blocks = 0;
  FASTQT_CHECK(cudaDeviceGetAttribute, &cooperative, cudaDevAttrCooperativeLaunch, device);
  STD_TORCH_CHECK(cooperative, "the GPU has no cooperative launch");
  FASTQT_CHECK(cudaDeviceGetAttribute, &multiprocessors, cudaDevAttrMultiProcessorCount, device);

  constexpr int kBytes = SmallKernel<P>::kSharedBytes;
  FASTQT_CHECK(cudaFuncSetAttribute, reinterpret_cast<const void*>(&small_kernel<P>),
               cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  FASTQT_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor, &blocks,
               reinterpret_cast<const void*>(&small_kernel<P>), kThreads, kBytes);
  STD_TORCH_CHECK(blocks > 0, "no block of the kernel fits a multiprocessor of the GPU");
  return known[device] = multiprocessors;
}

// A choice takes microseconds, and a training asks for the same one at every step.
template <class P>
Tiles remembered_tiles(const SmallProblem& p, int blocks) {
  using Key = std::array<int, 6>;
  static thread_local std::pair<Key, Tiles> last;
  const Key key{p.N, p.M, p.D, p.dqueries != nullptr, p.dcandidates != nullptr, blocks};
  if (last.first != key) last = {key, choose_tiles(p, P::kCosts, blocks)};
  return last.second;
}

template <class P>
void launch(SmallProblem p, const Tensor& like) {
  const int device = like.get_device_index();
  const cudaStream_t stream = current_stream(device);
  on_device(device, [&] {
    const int blocks = blocks_at_once<P>(device);
    p.tiles = remembered_tiles<P>(p, blocks);
    constexpr int kElementBytes = sizeof(typename P::Value);
    const int64_t bytes = lay_out_workspace(p, kElementBytes, nullptr);
    const Tensor workspace = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
    lay_out_workspace(p, kElementBytes, workspace.data_ptr());
    void* arguments[] = {&p};
    FASTQT_CHECK(cudaLaunchCooperativeKernel, reinterpret_cast<const void*>(&small_kernel<P>),
                 dim3(blocks), dim3(kThreads), arguments,
                 static_cast<size_t>(SmallKernel<P>::kSharedBytes), stream);
  });
}

template <class T = void>
T* pointer(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

// Each row's loss, log-sum-exp and mass, and of sum_i row_weight_i loss_i the value and the
// gradients that are given a place. All tensors are contiguous, on one device.
void small_contrastive_(
    const Tensor queries, const Tensor candidates, const std::optional<Tensor> row_negatives,
    const std::optional<Tensor> partners, double mix, const std::optional<Tensor> scale,
    double scale_value, int64_t diagonal, const Tensor starts, const Tensor columns,
    const Tensor weights, const std::optional<Tensor> row_weights, double row_weight, bool tf32,
    const Tensor logsumexp, const Tensor mass, const Tensor loss, const std::optional<Tensor> total,
    const std::optional<Tensor> dqueries, const std::optional<Tensor> dcandidates,
    const std::optional<Tensor> drow_negatives, const std::optional<Tensor> dscale) {
  SmallProblem p{};
  STD_TORCH_CHECK(queries.size(0) <= kMostRows && candidates.size(0) <= kMostRows &&
                      queries.size(1) <= kMostWidth,
                  "more than 1024 queries or candidates, or wider than 4800");
  p.N = static_cast<int>(queries.size(0));
  p.M = static_cast<int>(candidates.size(0));
  p.D = static_cast<int>(queries.size(1));
  p.queries = queries.data_ptr();
  p.candidates = candidates.data_ptr();
  p.row_negatives = pointer(row_negatives);
  p.partners = pointer<int64_t>(partners);
  p.mix = static_cast<float>(mix);
  p.scale = pointer<float>(scale);
  p.scale_value = static_cast<float>(scale_value);
  p.diagonal = static_cast<int>(diagonal);
  p.starts = static_cast<const int64_t*>(starts.data_ptr());
  p.columns = static_cast<const int64_t*>(columns.data_ptr());
  p.weights = static_cast<const double*>(weights.data_ptr());
  p.row_weights = pointer<double>(row_weights);
  p.row_weight = row_weight;
  p.logsumexp = static_cast<double*>(logsumexp.data_ptr());
  p.mass = static_cast<double*>(mass.data_ptr());
  p.loss = static_cast<double*>(loss.data_ptr());
  p.total = pointer<float>(total);
  p.dqueries = pointer(dqueries);
  p.dcandidates = pointer(dcandidates);
  p.drow_negatives = pointer(drow_negatives);
  p.dscale = pointer<double>(dscale);

  const torch::stable::accelerator::DeviceGuard guard(queries.get_device_index());
  switch (queries.scalar_type()) {
    case ScalarType::BFloat16: return launch<HalfArithmetic<bfloat16>>(p, queries);
    case ScalarType::Half: return launch<HalfArithmetic<float16>>(p, queries);
    case ScalarType::Float:
      return tf32 ? launch<Tf32Arithmetic>(p, queries) : launch<FloatArithmetic>(p, queries);
    default: STD_TORCH_CHECK(false, "want bfloat16, float16 or float32");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "small_contrastive_(Tensor queries, Tensor candidates, Tensor? row_negatives, Tensor? "
      "partners, float mix, "
      "Tensor? scale, float scale_value, int diagonal, Tensor starts, Tensor columns, Tensor "
      "weights, "
      "Tensor? row_weights, float row_weight, bool tf32, Tensor(a!) logsumexp, Tensor(b!) mass, "
      "Tensor(c!) loss, "
      "Tensor(d!)? total, Tensor(e!)? dqueries, Tensor(f!)? dcandidates, Tensor(g!)? "
      "drow_negatives, "
      "Tensor(h!)? dscale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CUDA, m) {
  m.impl("small_contrastive_", TORCH_BOX(&small_contrastive_));
}

}  // namespace fastqt::cuda
