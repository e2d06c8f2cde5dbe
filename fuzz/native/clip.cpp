// The operator of CLIP's loss, with tiles of all sizes, of which some are kept, and with malformed arguments. A tame
// problem has finite results, which do not depend on its tiles.
#include <functional>
#include <string_view>

#include "operators.h"

namespace fuzz {
namespace {

// Sizes above 256 have more than one stripe of columns (see clip_tile.cpp). They take a thousand times as long as the
// others, so the input as a whole decides: a mutation of a large problem is hardly ever another one.
void run(Source& source, bool large) {
  const int64_t N = large ? source.between(255, 260) : source.size(16), D = source.size(6);
  const at::ScalarType dtype = source.dtype();
  const Tensor queries = source.tensor({N, D}, dtype), candidates = source.tensor({N, D}, dtype);
  const double scale = source.number();
  const auto tile = [&] { return source.wild() ? source.any_integer() : source.between(large ? N / 3 : 1, N + 1); };
  const bool known = !source.tame && source.flag(), normalize = !source.tame && source.flag();
  const auto maybe = [&](std::vector<int64_t> sizes, at::ScalarType kind) {
    return source.flag() ? std::optional<Tensor>(source.contiguous(std::move(sizes), kind)) : std::nullopt;
  };
  const auto weights = source.tame ? std::optional<Tensor>(source.contiguous({N}, at::kDouble)) : maybe({N}, at::kDouble);
  const auto dqueries = maybe({N, D}, dtype), dcandidates = maybe({N, D}, dtype), dscale = maybe({}, at::kDouble);
  const Tensor sums = source.contiguous({3, N}, at::kDouble), loss = source.contiguous({N}, at::kDouble);
  const auto walk = [&](int64_t rows, int64_t columns, int64_t kept) {
    return call("clip_walk_",
                {queries, candidates, scale, normalize, rows, columns, kept, known, sums, loss, optional(weights),
                 optional(dqueries), optional(dcandidates), optional(dscale)},
                source.tame);
  };
  const int64_t rows = tile(), columns = tile();
  const int64_t kept_tiles = source.wild() ? source.any_integer() : source.between(1, N + 1);
  walk(rows, columns, kept_tiles);
  if (!source.tame) return;

  require_finite(loss, "a loss that is not finite");
  const Tensor before = loss.clone();
  std::vector<Tensor> gradients, kept;
  for (const auto& gradient : {dqueries, dcandidates, dscale}) {
    if (!gradient) continue;
    require_finite(*gradient, "a gradient that is not finite");
    gradients.push_back(*gradient), kept.push_back(gradient->clone());
  }
  walk(N, N, 1);
  require_close(loss, before, dtype, "a loss that depends on the tiles");
  for (std::size_t k = 0; k < kept.size(); ++k)
    require_close(gradients[k], kept[k], dtype, "a gradient that depends on the tiles");
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  fuzz::Source source(data, size);
  const std::size_t hash = std::hash<std::string_view>()({reinterpret_cast<const char*>(data), size});
  fuzz::run(source, hash % 256 == 0);
  return 0;
}
