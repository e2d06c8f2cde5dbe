// The three operators of a contrastive loss, on problems of all kinds and on malformed ones. On a
// tame problem they must agree with each other.
#include <cmath>

#include "operators.h"

namespace fuzz {
namespace {

struct Sizes {
  int64_t N, M, K, D;
};

Tensor row_starts(Source& source, int64_t rows, int64_t entries) {
  int64_t last = 0;
  const bool broken = source.wild();
  return source.integers({rows + 1}, [&](int64_t i) {
    if (broken) return source.any_integer();
    if (i == 0) return int64_t{0};
    if (i == rows) return entries;
    return last = source.between(last, entries);
  });
}

// Targets as compressed rows, in which a column may be repeated. A tame problem has none on the
// diagonal or masked.
void add_compressed_targets(Source& source, const Sizes& size, Stack& arguments) {
  const int64_t entries = source.between(0, 3 * size.N);
  arguments.emplace_back(row_starts(source, size.N, entries));
  const bool broken = source.wild();
  arguments.emplace_back(source.integers({entries}, [&](int64_t) {
    return broken ? source.any_integer() : source.between(0, size.M - 1);
  }));
  arguments.emplace_back(source.contiguous({entries}, at::kDouble, true));
  arguments.emplace_back();  // no dense matrix
}

void add_dense_targets(Source& source, const Sizes& size, at::ScalarType dtype, Stack& arguments) {
  for (int k = 0; k < 3; ++k) arguments.emplace_back();
  arguments.emplace_back(source.tensor({size.N, size.M}, dtype, true));
}

void add_exclusions(Source& source, const Sizes& size, bool has_background, Stack& arguments) {
  const auto groups = [&](int64_t rows) {
    return source.integers(
        {rows}, [&](int64_t) { return source.tame ? source.between(0, 2) : source.any_integer(); });
  };
  const bool grouped = source.flag() && !(source.tame && has_background),
             masked = !source.tame && source.flag();
  const bool one_only = source.wild();
  arguments.push_back(optional(grouped ? std::optional<Tensor>(groups(size.N)) : std::nullopt));
  arguments.push_back(
      optional(grouped && !one_only ? std::optional<Tensor>(groups(size.M)) : std::nullopt));
  arguments.push_back(
      optional(masked ? std::optional<Tensor>(source.mask({size.N, size.M})) : std::nullopt));
}

Stack problem(Source& source, const Sizes& size, at::ScalarType dtype, int64_t link) {
  const at::ScalarType computed = dtype == at::kBFloat16 ? at::kFloat : dtype;
  const auto maybe = [&](std::vector<int64_t> sizes, bool there) {
    return there ? std::optional<Tensor>(source.tensor(std::move(sizes), dtype)) : std::nullopt;
  };
  std::optional<Tensor> bias;
  if (source.flag()) bias = source.contiguous({size.M}, computed);
  Stack arguments{source.tensor({size.N, size.D}, dtype), source.tensor({size.M, size.D}, dtype)};
  arguments.push_back(optional(maybe({size.K, size.D}, size.K > 0)));
  arguments.push_back(optional(maybe({size.N, size.D}, source.flag())));
  arguments.push_back(optional(bias));
  arguments.emplace_back(source.number());
  arguments.emplace_back(source.wild() ? source.any_integer() : link);
  const int64_t diagonal = source.tame ? 2 : source.between(0, 2);
  arguments.emplace_back(source.wild() ? source.any_integer() : diagonal);
  // bfloat16 has no dense targets.
  if (source.flag() || (source.tame && dtype == at::kBFloat16)) {
    add_compressed_targets(source, size, arguments);
  } else {
    add_dense_targets(source, size, computed, arguments);
  }
  std::optional<Tensor> background;
  if (source.flag()) background = source.contiguous({size.N}, at::kDouble, true);
  arguments.push_back(optional(background));
  add_exclusions(source, size, background.has_value(), arguments);
  // Rows close to 0 have gradients without a limit, which no two ways to compute them share.
  arguments.emplace_back(!source.tame && source.flag());
  arguments.push_back(optional(
      source.flag() ? std::optional<Tensor>(source.contiguous({size.N}, computed)) : std::nullopt));

  // Two ways to compute a score may leave it on two sides of a threshold, so that those of a tame
  // problem are infinite. Callers refuse thresholds with a scale that is not positive.
  constexpr std::size_t kScale = 5;
  std::optional<Tensor> thresholds;
  if (source.flag() && (!source.tame || arguments[kScale].toDouble() > 0)) {
    thresholds = source.contiguous({size.N}, computed);
    if (source.tame) thresholds->fill_(INFINITY);
  }
  arguments.push_back(optional(thresholds));
  return arguments;
}

Stack with(Stack arguments, std::initializer_list<c10::IValue> more) {
  arguments.insert(arguments.end(), more);
  return arguments;
}

// Which gradients are asked for: of a tame problem those that can be.
std::vector<bool> needs(Source& source, const Stack& given) {
  std::vector<bool> made(source.wild() ? source.between(0, 9) : 7);
  constexpr int kInputs[] = {0, 1, 2, 3, 5, 4, 17};  // the positions among the arguments
  for (std::size_t k = 0; k < made.size(); ++k)
    made[k] = source.flag() && (!source.tame || k >= 7 || !given[kInputs[k]].isNone());
  return made;
}

void run(Source& source) {
  const Sizes size{source.size(12), source.size(20), source.between(0, 3), source.size(6)};
  const at::ScalarType dtype = source.flag() ? source.dtype() : at::kBFloat16;
  const int64_t link = source.between(0, 2);
  const Stack given = problem(source, size, dtype, link);
  const auto tile = [&](int64_t most) {
    return source.wild() ? source.any_integer() : source.between(1, most + 1);
  };
  const int64_t rows = tile(size.N), columns = tile(size.M + size.K);
  const std::vector<bool> asked = needs(source, given);
  const c10::List<bool> list = [&] {
    c10::List<bool> made;
    for (const bool need : asked) made.push_back(need);
    return made;
  }();
  const double row_weight = source.number();

  const auto first = call("contrastive_loss_rows", with(given, {rows, columns}), source.tame);
  const std::optional<int64_t> tiles =
      link == 1 || source.wild() ? std::optional<int64_t>(columns) : std::nullopt;
  const auto second = call("contrastive_loss_with_gradients",
                           with(given, {rows, optional(tiles), row_weight, list}), source.tame);
  Tensor weights, logsumexp, mass;
  if (first && !source.wild()) {
    weights = at::full({size.N}, row_weight, at::kDouble), logsumexp = (*first)[0].toTensor(),
    mass = (*first)[1].toTensor();
  } else {
    weights = source.contiguous({size.N}, at::kDouble),
    logsumexp = source.contiguous({size.N}, at::kDouble),
    mass = source.contiguous({size.N}, at::kDouble);
  }
  const auto third =
      call("contrastive_loss_backward",
           with(given, {rows, columns, weights, logsumexp, mass, list}), source.tame);
  if (!source.tame) return;

  require((*first)[3].toInt() == 0 && (*second)[2].toInt() == 0 && (*third)[1].toInt() == 0,
          "a target at fault");
  const Tensor loss = (*first)[2].toTensor(), total = (*second)[0].toTensor();
  // Of no candidates at all the logsumexp is -inf.
  if (link != 2 || !loss.isneginf().any().item<bool>()) {
    require_finite(loss, "a loss that is not finite");
    require_close(total.to(at::kDouble), row_weight * loss.sum(), dtype,
                  "a total that is not the sum of its rows");
  }
  const auto once = (*second)[1].toTensorVector(), again = (*third)[0].toTensorVector();
  require(once.size() == again.size(), "gradients of two numbers");
  for (std::size_t k = 0; k < once.size(); ++k) {
    require_finite(once[k], "a gradient that is not finite");
    require_close(again[k], once[k], dtype, "two gradients that are not equal");
  }
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  fuzz::Source source(data, size);
  fuzz::run(source);
  return 0;
}
