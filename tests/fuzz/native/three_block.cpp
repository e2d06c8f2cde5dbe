// The operator of MixCSE's three blocks, with chunks of all sizes and with malformed arguments. A
// tame problem has finite results, which do not depend on its chunks.
#include <functional>
#include <string_view>

#include "operators.h"

namespace fuzz {
namespace {

// Above 32 rows a chunk has more than one piece (see three_block_tile.cpp). The input as a whole
// decides: a mutation of a large problem is hardly ever another one.
void run(Source& source, bool large) {
  const int64_t N = large ? source.between(63, 67) : 1 + source.size(16), D = source.size(6);
  const at::ScalarType dtype = source.dtype();
  const Tensor queries = source.tensor({N, D}, dtype), candidates = source.tensor({N, D}, dtype);
  const Tensor shares = source.contiguous({4, N}, dtype);
  const double scale = source.number(), own_mixture_weight = source.number();
  const bool third_block = source.flag(), masks_excluded = source.flag(),
             stop_gradient = source.flag();
  const int64_t rows = source.wild() ? source.any_integer() : source.between(1, N + 1);
  const auto maybe = [&](std::vector<int64_t> sizes, at::ScalarType kind) {
    return source.flag() ? std::optional<Tensor>(source.contiguous(std::move(sizes), kind))
                         : std::nullopt;
  };
  const auto weights = source.tame ? std::optional<Tensor>(source.contiguous({N}, at::kDouble))
                                   : maybe({N}, at::kDouble);
  const auto dqueries = maybe({N, D}, dtype), dcandidates = maybe({N, D}, dtype),
             dshares = maybe({4, N}, dtype), dscale = maybe({}, at::kDouble);
  const Tensor loss = source.contiguous({N}, at::kDouble);
  const auto walk = [&](int64_t chunk_rows) {
    return call("three_block_walk_",
                {queries, candidates, shares, scale, third_block, masks_excluded,
                 own_mixture_weight, stop_gradient, chunk_rows, loss, optional(weights),
                 optional(dqueries), optional(dcandidates), optional(dshares), optional(dscale)},
                source.tame);
  };
  walk(rows);
  if (!source.tame) return;

  require_finite(loss, "a loss that is not finite");
  const Tensor before = loss.clone();
  std::vector<Tensor> gradients, kept;
  for (const auto& gradient : {dqueries, dcandidates, dshares, dscale}) {
    if (!gradient) continue;
    require_finite(*gradient, "a gradient that is not finite");
    gradients.push_back(*gradient), kept.push_back(gradient->clone());
  }
  walk(N);
  require_close(loss, before, dtype, "a loss that depends on the chunks");
  for (std::size_t k = 0; k < kept.size(); ++k)
    require_close(gradients[k], kept[k], dtype, "a gradient that depends on the chunks");
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  fuzz::Source source(data, size);
  const std::size_t hash =
      std::hash<std::string_view>()({reinterpret_cast<const char*>(data), size});
  fuzz::run(source, hash % 64 == 0);
  return 0;
}
