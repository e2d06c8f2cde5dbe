// Adam of the rows of a table that a batch has touched, and what the other rows have missed.
//
// There are V rows of width D; R of them have a gradient, each once.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/checks.h"
#include "cpu/dtypes.h"
#include "cpu/matrix.h"
#include "cpu/missed_steps.h"
#include "cpu/parallel.h"
#include "cpu/table_passes.h"

namespace fastqt {
namespace {

// The table and its moments: three contiguous matrices (V, D) of float32 or float64.
void check_tables(const Tensor& table, const Tensor& first, const Tensor& second) {
  const ScalarType dtype = table.scalar_type();
  STD_TORCH_CHECK((dtype == ScalarType::Float || dtype == ScalarType::Double) && table.dim() == 2,
                  "table: want a float32 or float64 matrix, got ", described(table));
  const int64_t V = table.size(0), D = table.size(1);
  check_tensor("table", table, dtype, {kAnySize, kAnySize}, Layout::kContiguous);
  check_tensor("exp_avg", first, dtype, {V, D}, Layout::kContiguous);
  check_tensor("exp_avg_sq", second, dtype, {V, D}, Layout::kContiguous);
}

const int64_t* integers(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Long &&
                      tensor.dim() == 1 && tensor.is_contiguous(),
                  name, ": want a contiguous int64 vector on the CPU, got ", described(tensor));
  return tensor.const_data_ptr<int64_t>();
}

template <class F>
void with_float(const Tensor& table, const F& visit) {
  if (table.scalar_type() == ScalarType::Double) visit(double{});
  else visit(float{});
}

// Row rows[i] takes its step number steps[i] with gradient i.
void adam_rows(Tensor table, Tensor first, Tensor second,
               const Tensor& rows,      // (R,) ascending
               const Tensor& gradient,  // (R, D)
               const Tensor& steps,     // (R,)
               double lr, double beta1, double beta2, double eps, double weight_decay,
               bool decoupled, bool maximize) {
  check_tables(table, first, second);
  const int64_t *row = integers("rows", rows), *step = integers("steps", steps);
  const int64_t V = table.size(0), D = table.size(1), R = rows.size(0);
  STD_TORCH_CHECK(steps.size(0) == R, "steps: want ", R, " numbers, got ", described(steps));
  STD_TORCH_CHECK(gradient.is_cpu() && gradient.scalar_type() == table.scalar_type() &&
                      gradient.dim() == 2 && gradient.size(0) == R && gradient.size(1) == D,
                  "gradient: want (", R, ", ", D, ") of the table's dtype, got ",
                  described(gradient));
  // Ascending, so that no row is written by two threads.
  for (int64_t i = 0; i < R; ++i)
    STD_TORCH_CHECK(row[i] >= 0 && row[i] < V && (i == 0 || row[i - 1] < row[i]),
                    "rows: want ascending numbers in 0..", V - 1, ", got ", row[i], " at position ",
                    i);

  const Tensor gradients = with_adjacent_columns(gradient);
  with_float(table, [&]<class T>(T) {
    const RowsOf<T> p(table), m(first), v(second), g(gradients);
    in_parallel(R, 8 * D, [&](int64_t begin, int64_t end) {
      AdamStep<T> scalars{static_cast<T>(1 - beta1),
                          static_cast<T>(beta2),
                          static_cast<T>(1 - beta2),
                          static_cast<T>(eps),
                          static_cast<T>(maximize ? -1 : 1),
                          static_cast<T>(decoupled ? 0 : weight_decay),
                          static_cast<T>(decoupled ? 1 - lr * weight_decay : 1),
                          0,
                          0};
      for (int64_t i = begin; i < end; ++i) {
        const auto t = static_cast<double>(step[i]);
        scalars.size = static_cast<T>(lr / (1 - std::pow(beta1, t)));
        scalars.root_correction = static_cast<T>(std::sqrt(1 - std::pow(beta2, t)));
        adam_row(p[row[i]], m[row[i]], v[row[i]], g[i], scalars, D);
      }
    });
  });
}

struct Behind {
  int64_t row, since;
};

// Brings rows of a table up to `step`: those of `rows`, which may repeat, or all. Row r is right up
// to step last[r]. `rates` (W, 2) has lr and the decay's factor of step s at (s - 1) mod W, and W
// is at least the number of steps that a row may miss. Without `moments` only the table is written.
void replay_rows(Tensor table, Tensor first, Tensor second, Tensor last,
                 const std::optional<Tensor> rows, const Tensor& rates, int64_t step, double beta1,
                 double beta2, double eps, bool moments) {
  check_tables(table, first, second);
  const int64_t V = table.size(0), D = table.size(1);
  check_tensor("last", last, ScalarType::Long, {V}, Layout::kContiguous);
  check_tensor("rates", rates, ScalarType::Double, {kAnySize, 2}, Layout::kContiguous);
  STD_TORCH_CHECK(moments || !rows, "rows: want None without moments, got ", described(*rows));
  STD_TORCH_CHECK(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
                  "beta1, beta2: want numbers in [0, 1), got ", beta1, " and ", beta2);
  const int64_t W = rates.size(0);
  STD_TORCH_CHECK(step >= 0, "step: want at least 0, got ", step);
  if (step == 0) return;
  const int64_t window = (step - 1) / W * W;  // the step before the first one of `rates`

  auto* const up_to = last.mutable_data_ptr<int64_t>();
  const int64_t* const ids = rows ? integers("rows", *rows) : nullptr;
  const int64_t count = rows ? rows->size(0) : V;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = ids == nullptr ? i : ids[i];
    STD_TORCH_CHECK(row >= 0 && row < V, "rows: index out of range: want 0..", V - 1, ", got ", row,
                    " at position ", i);
    STD_TORCH_CHECK(up_to[row] >= window && up_to[row] <= step, "last: want ", window, "..", step,
                    ", got ", up_to[row], " for row ", row);
  }

  std::vector<Behind> behind;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = ids == nullptr ? i : ids[i];
    if (up_to[row] == step) continue;
    behind.push_back({row, up_to[row]});
    if (moments) up_to[row] = step;  // a row that repeats is taken once
  }
  if (behind.empty()) return;

  const auto distance = step - window;
  std::vector<bool> is_missed(distance, false);
  int64_t earliest = step;
  for (const Behind& each : behind) {
    is_missed[each.since - window] = true;
    earliest = std::min(earliest, each.since);
  }
  std::vector<int64_t> starts;  // each step since which a row has missed all
  for (int64_t i = 0; i < distance; ++i)
    if (is_missed[i]) starts.push_back(window + i);

  with_float(table, [&]<class T>(T) {
    const auto* const values = rates.const_data_ptr<double>() + 2 * (earliest - window);
    const MissedSteps<T> steps({earliest, values}, step, beta1, beta2);
    std::vector<std::vector<Term<T>>> terms(distance);
    std::vector<Missed<T>> missed(distance);
    const auto planned = static_cast<int64_t>(starts.size());
    in_parallel(planned, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t since = starts[i], at = since - window;
        terms[at] = steps.terms(since);
        missed[at] = {terms[at].data(), static_cast<int64_t>(terms[at].size()), steps.keep(since),
                      steps.first_decay(since), steps.second_decay(since)};
      }
    });

    const RowsOf<T> p(table), m(first), v(second);
    in_parallel(static_cast<int64_t>(behind.size()), 8 * D, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto [row, since] = behind[i];
        replay_row(p[row], m[row], v[row], missed[since - window], static_cast<T>(eps), D, moments);
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "adam_rows_(Tensor(a!) table, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor rows, "
      "Tensor gradient, Tensor steps, float lr, float beta1, float beta2, float eps, "
      "float weight_decay, bool decoupled, bool maximize) -> ()");
  m.def(
      "replay_rows_(Tensor(a!) table, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) last, "
      "Tensor? rows, Tensor rates, int step, float beta1, float beta2, float eps, bool moments) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("adam_rows_", TORCH_BOX(&adam_rows));
  m.impl("replay_rows_", TORCH_BOX(&replay_rows));
}

}  // namespace fastqt
