// The operators of CLIP's loss, with tiles of all sizes, of which some are kept, and with malformed
// arguments. A tame problem has finite results, which do not depend on its tiles.
#include <algorithm>
#include <functional>
#include <string_view>

#include "operators.h"

namespace fuzz {
namespace {

// Sizes above 256 have more than one stripe of columns (see clip_tile.cpp). They take a thousand
// times as long as the others, so the input as a whole decides: a mutation of a large problem is
// hardly ever another one.
void run(Source& source, bool large) {
  const int64_t N = large ? source.between(255, 260) : source.size(16), D = source.size(6);
  const at::ScalarType dtype = source.dtype();
  const Tensor queries = source.tensor({N, D}, dtype), candidates = source.tensor({N, D}, dtype);
  const double scale = source.number();
  const auto tile = [&] {
    return source.wild() ? source.any_integer() : source.between(large ? N / 3 : 1, N + 1);
  };
  const bool known = !source.tame && source.flag(), normalize = !source.tame && source.flag();
  const auto maybe = [&](std::vector<int64_t> sizes, at::ScalarType kind) {
    return source.flag() ? std::optional<Tensor>(source.contiguous(std::move(sizes), kind))
                         : std::nullopt;
  };
  const auto weights = source.tame ? std::optional<Tensor>(source.contiguous({N}, at::kDouble))
                                   : maybe({N}, at::kDouble);
  const auto dqueries = maybe({N, D}, dtype), dcandidates = maybe({N, D}, dtype),
             dscale = maybe({}, at::kDouble);
  const Tensor sums = source.contiguous({3, N}, at::kDouble),
               loss = source.contiguous({N}, at::kDouble);
  const auto walk = [&](int64_t rows, int64_t columns, int64_t kept) {
    return call("clip_walk_",
                {queries, candidates, scale, normalize, rows, columns, kept, known, sums, loss,
                 optional(weights), optional(dqueries), optional(dcandidates), optional(dscale)},
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

// The two operators of a rectangle of the scores, with pairs or without.
void run_rectangle(Source& source) {
  const int64_t N = source.size(16), M = source.size(16), D = source.size(6);
  const at::ScalarType dtype = source.dtype();
  const Tensor queries = source.tensor({N, D}, dtype), candidates = source.tensor({M, D}, dtype);
  const double scale = source.number();
  const bool normalize = !source.tame && source.flag();
  const auto tile = [&] {
    return source.wild() ? source.any_integer() : source.between(1, std::max(N, M));
  };
  const auto numbers = [&](int64_t size) { return source.contiguous({size}, at::kDouble, true); };
  const int64_t pairs = source.wild() ? source.between(0, 20) : source.between(0, std::min(N, M));
  const Tensor positive = numbers(pairs), of_rows = numbers(N), of_columns = numbers(M);
  const auto find_sums = [&](int64_t rows, int64_t columns) {
    call("clip_sums_",
         {queries, candidates, scale, normalize, rows, columns, positive, of_rows, of_columns},
         source.tame);
  };
  // A row whose only cell is a pair has no others.
  const auto sums = [&] { return at::cat({positive, of_rows, of_columns}).clamp_min(-1e3); };
  const int64_t rows = tile(), columns = tile();
  find_sums(rows, columns);
  const Tensor row_weights = numbers(N), column_weights = numbers(M), of_pairs = numbers(pairs);
  const auto maybe = [&](std::vector<int64_t> sizes, at::ScalarType kind) {
    return source.flag() ? std::optional<Tensor>(source.contiguous(std::move(sizes), kind))
                         : std::nullopt;
  };
  const auto dqueries = maybe({N, D}, dtype), dcandidates = maybe({M, D}, dtype),
             dscale = maybe({}, at::kDouble);
  // Of scores of order 1: no cell's exponential is large.
  const Tensor row_logsumexp = source.tame ? of_rows.clamp_min(0) : of_rows;
  const Tensor column_logsumexp = source.tame ? of_columns.clamp_min(0) : of_columns;
  const auto find_gradients = [&](int64_t tile_rows, int64_t tile_columns) {
    call("clip_gradients_",
         {queries, candidates, scale, normalize, tile_rows, tile_columns, row_logsumexp,
          row_weights, column_logsumexp, column_weights, of_pairs, optional(dqueries),
          optional(dcandidates), optional(dscale)},
         source.tame);
    std::vector<Tensor> found;
    for (const auto& gradient : {dqueries, dcandidates, dscale})
      if (gradient) found.push_back(gradient->clone());
    return found;
  };
  const std::vector<Tensor> gradients = find_gradients(rows, columns);
  if (!source.tame) return;

  const Tensor before = sums();
  require_finite(before, "sums that are not finite");
  find_sums(N, M);
  require_close(sums(), before, dtype, "sums that depend on the tiles");
  const std::vector<Tensor> again = find_gradients(N, M);
  for (std::size_t k = 0; k < again.size(); ++k) {
    require_finite(gradients[k], "a gradient of a rectangle that is not finite");
    require_close(again[k], gradients[k], dtype,
                  "a gradient of a rectangle that depends on the tiles");
  }
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  fuzz::Source source(data, size);
  const std::size_t hash =
      std::hash<std::string_view>()({reinterpret_cast<const char*>(data), size});
  if (source.flag()) fuzz::run_rectangle(source);
  else fuzz::run(source, hash % 256 == 0);
  return 0;
}
