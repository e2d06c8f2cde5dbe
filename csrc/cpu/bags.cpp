// Bags of rows of a table: the sum or the mean of each bag's rows, and for its gradient the sums of
// rows by the number of the row that they belong to, each number once and in ascending order.
//
// There are V rows of width D, T ids and B bags; the ids of bag b begin at offsets[b]. Both
// operators sum groups of rows. Each sum is made by one thread, in the order of the ids, so that
// the number of threads does not change its bits.
//
// A group is summed a block of columns at a time, and all groups for one block before the next one.
// The gradient reads each of B rows many times: the part of them that a narrow block needs stays in
// a cache. Bags read rows of a table that no cache holds, so that a row is best read to its end.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/checks.h"
#include "cpu/dtypes.h"
#include "cpu/matrix.h"
#include "cpu/parallel.h"
#include "cpu/row_passes.h"
#include "cpu/table_passes.h"

namespace fastqt {
namespace {

constexpr int64_t kBagColumns = 1024, kGradientColumns = 128;

// A contiguous vector of int64, which may be empty.
const int64_t* integers(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Long &&
                      tensor.dim() == 1 && tensor.is_contiguous(),
                  name, ": want a contiguous int64 vector on the CPU, got ", described(tensor));
  return tensor.const_data_ptr<int64_t>();
}

void check_matrix(const char* name, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.dim() == 2 &&
                      (dtype == ScalarType::Float || dtype == ScalarType::Double ||
                       dtype == ScalarType::BFloat16),
                  name, ": want a float32, float64 or bfloat16 matrix on the CPU, got ",
                  described(tensor));
}

void check_ids(const int64_t* ids, int64_t size, int64_t rows) {
  for (int64_t t = 0; t < size; ++t)
    STD_TORCH_CHECK(ids[t] >= 0 && ids[t] < rows, "ids: index out of range: want 0..", rows - 1,
                    ", the rows of the table, got ", ids[t], " at position ", t);
}

// Where each bag begins and, after them, where the last one ends.
std::vector<int64_t> starts_of(const Tensor& offsets, int64_t size) {
  const int64_t* const begins = integers("offsets", offsets);
  const int64_t bags = offsets.size(0);
  std::vector<int64_t> starts(begins, begins + bags);
  starts.push_back(size);
  STD_TORCH_CHECK(starts[0] == 0,
                  "offsets: want the first to be 0, so that each id has a bag, got ",
                  bags > 0 ? starts[0] : -1);
  for (int64_t b = 0; b < bags; ++b)
    STD_TORCH_CHECK(starts[b] <= starts[b + 1], "offsets: want ascending numbers up to ", size,
                    ", the number of ids, got ", starts[b], " before ", starts[b + 1]);
  return starts;
}

// Row g of `out` becomes the sum of the rows sources[starts[g]] to sources[starts[g + 1] - 1] of
// `table`, each times the factor of its row where there are factors; or their mean.
template <class S>
void sum_groups(const Tensor& out, const Tensor& table, const int64_t* sources,
                const std::vector<int64_t>& starts, const Computed<S>* factors, bool mean,
                int64_t columns) {
  using T = Computed<S>;
  const RowsOf<S> from(table), to(out);
  const int64_t D = to.width, groups = out.size(0);
  const int64_t blocks = (D + columns - 1) / columns;

  // The work of a block of columns, in which a group has a place for each row and one for itself.
  const auto place = [&](int64_t group) { return starts[group] + group; };
  const int64_t span = place(groups);

  in_parallel(blocks * span, std::min(D, columns), [&](int64_t begin, int64_t end) {
    std::vector<T> unrounded(kRounds<S> ? columns : 0);
    for (int64_t block = begin / span; block * span < end; ++block) {
      const int64_t column = block * columns, width = std::min(columns, D - column);
      const int64_t first = begin - block * span, last = end - block * span;
      int64_t low = 0, high = groups;  // the first group whose place is not before `first`
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (place(middle) < first) low = middle + 1;
        else high = middle;
      }

      for (int64_t g = low; g < groups && place(g) < last; ++g) {
        const int64_t size = starts[g + 1] - starts[g];
        S* const row = to[g] + column;
        T* sums;
        if constexpr (kRounds<S>) sums = unrounded.data();
        else sums = row;
        rows_sum(sums, from.data + column, from.stride, sources + starts[g], factors, size, width);
        if (mean && size > 1)
          for (int64_t j = 0; j < width; ++j) sums[j] /= static_cast<T>(size);
        if constexpr (kRounds<S>) row_round(row, sums, width);
      }
    }
  });
}

Tensor bag_sum(const Tensor& table,    // (V, D)
               const Tensor& ids,      // (T,)
               const Tensor& offsets,  // (B,)
               bool mean) {
  check_matrix("table", table);
  const int64_t* const sources = integers("ids", ids);
  check_ids(sources, ids.size(0), table.size(0));
  const std::vector<int64_t> starts = starts_of(offsets, ids.size(0));
  const Tensor rows = with_adjacent_columns(table);
  const Tensor out = new_matrix(table, offsets.size(0), table.size(1));

  with_dtype(table.scalar_type(), [&]<class S>(S) {
    sum_groups<S>(out, rows, sources, starts, nullptr, mean, kBagColumns);
  });
  return out;
}

struct Use {
  int64_t id, source;
};

// Sorts by id, and keeps the order of uses of one id: by digits of the ids, from the lowest.
void sort_by_id(std::vector<Use>& uses, int64_t rows) {
  constexpr int kBits = 11;
  constexpr int64_t kDigits = int64_t{1} << kBits;
  std::vector<Use> sorted(uses.size());
  for (int shift = 0; shift < 63 && (rows - 1) >> shift > 0; shift += kBits) {
    const auto digit = [&](const Use& use) { return (use.id >> shift) & (kDigits - 1); };
    std::array<int64_t, kDigits + 1> places{};
    for (const Use& use : uses) ++places[digit(use) + 1];
    for (int64_t d = 0; d < kDigits; ++d) places[d + 1] += places[d];
    for (const Use& use : uses) sorted[places[digit(use)]++] = use;
    uses.swap(sorted);
  }
}

// The distinct ids (R,), ascending, and for each of them the sum of the values of its uses (R, D).
// Use t has row t of `values` or, with offsets, that of its bag; with `mean` the rows of a bag are
// divided by its size.
std::tuple<Tensor, Tensor> sum_by_row(const Tensor& ids,                    // (T,)
                                      const std::optional<Tensor> offsets,  // (B,)
                                      const Tensor& values,                 // (B, D) or (T, D)
                                      int64_t table_rows, bool mean) {
  check_matrix("values", values);
  const int64_t* const id = integers("ids", ids);
  const int64_t T_ = ids.size(0), sources_count = offsets ? offsets->size(0) : T_;
  STD_TORCH_CHECK(table_rows >= 0, "table_rows: want at least 0, got ", table_rows);
  check_ids(id, T_, table_rows);
  STD_TORCH_CHECK(values.size(0) == sources_count, "values: want ", sources_count, " rows, got ",
                  described(values));

  std::vector<Use> uses(T_);
  for (int64_t t = 0; t < T_; ++t) uses[t] = {id[t], t};
  std::vector<int64_t> bags;
  if (offsets) {
    bags = starts_of(*offsets, T_);
    for (int64_t b = 0; b < sources_count; ++b)
      for (int64_t t = bags[b]; t < bags[b + 1]; ++t) uses[t].source = b;
  }
  sort_by_id(uses, table_rows);

  std::vector<int64_t> sources(T_), starts;
  for (int64_t t = 0; t < T_; ++t) {
    sources[t] = uses[t].source;
    if (t == 0 || uses[t].id != uses[t - 1].id) starts.push_back(t);
  }
  const auto distinct = static_cast<int64_t>(starts.size());
  const Tensor rows = new_tensor<1>({distinct}, dtype_of(ids));
  int64_t* const row = rows.mutable_data_ptr<int64_t>();
  for (int64_t r = 0; r < distinct; ++r) row[r] = uses[starts[r]].id;
  starts.push_back(T_);

  const Tensor from = with_adjacent_columns(values);
  const Tensor sums = new_matrix(values, distinct, values.size(1));
  ask_for_large_pages(sums);
  with_dtype(values.scalar_type(), [&]<class S>(S) {
    using T = Computed<S>;
    std::vector<T> factors(offsets && mean ? sources_count : 0);
    for (std::size_t b = 0; b < factors.size(); ++b)
      factors[b] = 1 / static_cast<T>(std::max<int64_t>(1, bags[b + 1] - bags[b]));
    sum_groups<S>(sums, from, sources.data(), starts, factors.empty() ? nullptr : factors.data(),
                  false, kGradientColumns);
  });
  return {rows, sums};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def("bag_sum(Tensor table, Tensor ids, Tensor offsets, bool mean) -> Tensor");
  m.def(
      "sum_by_row(Tensor ids, Tensor? offsets, Tensor values, int table_rows, bool mean) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("bag_sum", TORCH_BOX(&bag_sum));
  m.impl("sum_by_row", TORCH_BOX(&sum_by_row));
}

}  // namespace fastqt
