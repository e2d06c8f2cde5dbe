// Which matrix products are fastqt's own and which are torch's, and how threads share the former.
#include "cpu/own_products.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <tuple>

#include "cpu/checks.h"
#include "cpu/matrix.h"

namespace fastqt {
namespace {

// Whose products are used, whether those of fastqt and of torch were timed on such a processor, and
// whether its vectors multiply bfloat16 at a lower rate than float32.
struct Choice {
  bool own, tiles, timed, slow_bfloat16;
};

// The family of this processor as its maker counts it, if it is one of this maker.
int64_t family_of([[maybe_unused]] const char* maker) {
#if defined(__x86_64__) && defined(__GNUC__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return 0;
  std::array<char, 12> name{};
  std::memcpy(name.data(), &ebx, 4);
  std::memcpy(name.data() + 4, &edx, 4);
  std::memcpy(name.data() + 8, &ecx, 4);
  if (std::string_view(name.data(), name.size()) != maker) return 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return 0;
  const unsigned base = eax >> 8 & 0xf, extended = eax >> 20 & 0xff;
  return base == 0xf ? base + extended : base;
#else
  return 0;
#endif
}

// FASTQT_CPU_PRODUCTS=own or torch decides. Without it, what was the faster where both were timed:
// on AMD's family 25 (Zen 3 and 4) the own products, in float32 as in bfloat16; on Intel's
// family 6 MKL's by a few per cent, in float32. AMD's other families have the same MKL, and are
// taken for that one. No other processor, and no tile, was timed: these keep torch's.
//
// Intel's vectors multiply bfloat16 at half the rate of float32 (a Xeon of family 6, model 207;
// benchmarks/bench_bfloat16.py), by own products as by oneDNN's. Only its tiles are faster.
Choice made_choice() {
  const int64_t amd = family_of("AuthenticAMD"), intel = family_of("GenuineIntel");
  const bool slow_bfloat16 = intel != 0;
  const char* const wanted = std::getenv("FASTQT_CPU_PRODUCTS");
  if (wanted != nullptr && *wanted != '\0') {
    const std::string_view text(wanted);
    STD_TORCH_CHECK(text == "own" || text == "torch",
                    "FASTQT_CPU_PRODUCTS: want own or torch, got ", wanted);
    return {text == "own", text == "own", true, slow_bfloat16};
  }
  return {amd != 0, false, amd == 25 || intel == 6, slow_bfloat16};
}

const Choice& choice() {
  static const Choice made = made_choice();
  return made;
}

// A product is shared by threads as a grid of rows and columns of `out`. Each thread packs the rows
// of a and the columns of b that it needs, so that no thread waits for another; the grid is the one
// in which they pack the least, and of two such the one with fewer columns a thread, whose parts
// are whole vectors and so less even.
void multiply_in_parallel(const PanelProduct& product, Vectors level) {
  constexpr int64_t kTermsPerTask = 1 << 19;  // which take longer than starting a thread on them
  constexpr int64_t kLeastRows = 8;           // of a part, if there are several
  // Parts have whole vectors of columns, but for the last one, or whole panels that were packed
  // before.
  const int64_t step = product.packed_b == nullptr ? 16 : panel_columns(level);
  const int64_t terms = product.rows * product.columns * std::max<int64_t>(1, product.depth);
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t tasks = std::clamp<int64_t>(terms / kTermsPerTask, 1, threads);

  int64_t down = 1;
  const int64_t columns_to_pack = product.packed_b == nullptr ? product.columns : 0;
  const auto packed = [&](int64_t parts) {
    return columns_to_pack * parts + product.rows * (tasks / parts);
  };
  for (int64_t parts = 2; parts <= tasks && parts * kLeastRows <= product.rows; ++parts)
    if (tasks % parts == 0 && packed(parts) <= packed(down)) down = parts;
  const int64_t across = tasks / down, steps = (product.columns + step - 1) / step;

  const auto row = [&](int64_t part) { return product.rows * part / down; };
  const auto column = [&](int64_t part) {
    return std::min(steps * part / across * step, product.columns);
  };
  const auto visit = [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t y = task / across, x = task % across;
      const PanelProduct part = product.part(row(y), row(y + 1), column(x), column(x + 1));
      if (part.rows > 0 && part.columns > 0) multiply_panels(part, level);
    }
  };
  if (tasks == 1) visit(0, 1);
  else torch::stable::parallel_for(0, tasks, 1, visit);
}

// `out` = a b, or `out` + factor * a b, by fastqt's own products of one level of vectors: for tests
// and benchmarks.
void own_product(Tensor out, Tensor a, Tensor b, double factor, bool add, int64_t level) {
  for (const auto* matrix : {&out, &a, &b})
    STD_TORCH_CHECK(matrix->dim() == 2 && matrix->is_cpu() &&
                        (matrix->scalar_type() == ScalarType::Float ||
                         matrix->scalar_type() == ScalarType::BFloat16),
                    "out, a, b: want matrices of float32 or bfloat16 on the CPU, got ",
                    described(*matrix));
  STD_TORCH_CHECK(out.size(0) == a.size(0) && a.size(1) == b.size(0) && out.size(1) == b.size(1),
                  "out, a, b: want (m, n), (m, k) and (k, n), got ", described(out), ", ",
                  described(a), " and ", described(b));
  const auto vectors = static_cast<Vectors>(level);
  const bool here = vectors == best_vectors() ||
                    (vectors == Vectors::kAvx2 && best_vectors() == Vectors::kAvx512) ||
                    (vectors == Vectors::kAvx512Bfloat16 && has_bfloat16_vectors()) ||
                    (vectors == Vectors::kAmx && has_tiles());
  STD_TORCH_CHECK(here && vectors != Vectors::kNone, "level: ", level,
                  " is not one of this processor");
  STD_TORCH_CHECK(own_multiply(out, a, b, add, factor, vectors),
                  "out, a, b: want operands of one dtype, which this level knows, and adjacent "
                  "rows or columns of out, "
                  "got ",
                  described(out), ", ", described(a), " and ", described(b));
}

Vectors best_of_bfloat16() {
  if (has_tiles()) return Vectors::kAmx;
  return has_bfloat16_vectors() ? Vectors::kAvx512Bfloat16 : Vectors::kNone;
}

// The levels that are used for operands in float32 and in bfloat16, 0 where torch's products are;
// the best that this processor has for each; whether both were timed on such a processor; and
// whether vectors of bfloat16 are slower on it than those of float32.
std::tuple<int64_t, int64_t, int64_t, int64_t, bool, bool> product_levels() {
  return {static_cast<int64_t>(own_products()),
          static_cast<int64_t>(own_bfloat16_products()),
          static_cast<int64_t>(best_vectors()),
          static_cast<int64_t>(best_of_bfloat16()),
          choice().timed,
          choice().slow_bfloat16};
}

// The matrix as torch's products read it. Those of bfloat16 read elements in pairs, and of a line
// of odd length the element behind its end, which they multiply by 0: where lines do not follow
// each other, that may be a NaN of memory that nobody has written. So lines that are apart are
// copied.
Tensor for_torch(const Tensor& matrix) {
  if (matrix.scalar_type() != ScalarType::BFloat16) return matrix;
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  // The stride between lines of which there is only one says nothing, but is read as if there were
  // more.
  if (rows == 1 && matrix.stride(1) == 1) return view(matrix, {1, columns}, {columns, 1}, 0);
  if (columns == 1 && matrix.stride(0) == 1) return view(matrix, {rows, 1}, {1, rows}, 0);
  const bool follow_each_other = (matrix.stride(1) == 1 && matrix.stride(0) == columns) ||
                                 (matrix.stride(0) == 1 && matrix.stride(1) == rows);
  return follow_each_other ? matrix : torch::stable::contiguous(matrix);
}

}  // namespace

Vectors own_products() { return choice().own ? best_vectors() : Vectors::kNone; }

Vectors own_products_of(const Tensor& operand) {
  const bool has_bfloat16 = operand.scalar_type() == ScalarType::BFloat16;
  return has_bfloat16 && own_products() != Vectors::kNone ? own_bfloat16_products()
                                                          : own_products();
}

Vectors own_bfloat16_products() {
  if (choice().tiles && has_tiles()) return Vectors::kAmx;
  const bool uses_vectors = has_bfloat16_vectors() && !choice().slow_bfloat16;
  return uses_vectors ? Vectors::kAvx512Bfloat16 : Vectors::kNone;
}

Strided strided(const Tensor& matrix) {
  return {matrix.data_ptr(), matrix.stride(0), matrix.stride(1),
          matrix.scalar_type() == ScalarType::BFloat16};
}

bool own_multiply(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha,
                  Vectors level, const std::byte* packed_b) {
  const ScalarType dtype = out.scalar_type(), operands = a.scalar_type();
  const bool rounds = multiplies_bfloat16(level), has_bfloat16 = operands == ScalarType::BFloat16;
  const bool knows_dtypes =
      operands == b.scalar_type() && (operands == ScalarType::Float || (rounds && has_bfloat16)) &&
      (dtype == ScalarType::Float || (rounds && dtype == ScalarType::BFloat16 && beta == 0));
  if (level == Vectors::kNone || !knows_dtypes || (beta != 0 && beta != 1)) return false;

  const int64_t rows = out.size(0), columns = out.size(1), depth = a.size(1);
  const auto factor = static_cast<float>(alpha);
  const bool has_adjacent_columns = out.stride(1) == 1 || columns == 1;
  const Rows to{out.data_ptr(), out.stride(has_adjacent_columns ? 0 : 1),
                dtype == ScalarType::BFloat16};
  if (has_adjacent_columns) {
    multiply_in_parallel(
        {to, strided(a), strided(b), rows, columns, depth, factor, beta == 1, packed_b, 0, columns},
        level);
    return true;
  }

  // The transpose of `out`, whose columns are adjacent, is the product of both transposes in the
  // other order.
  if ((out.stride(0) != 1 && rows != 1) || packed_b != nullptr) return false;
  multiply_in_parallel({to, strided(b).transposed(), strided(a).transposed(), columns, rows, depth,
                        factor, beta == 1},
                       level);
  return true;
}

void multiply(const Tensor& out, const Tensor& a, const Tensor& b, double beta, double alpha) {
  if (own_multiply(out, a, b, beta, alpha, own_products_of(a))) return;
  const Tensor left = for_torch(a), right = for_torch(b);
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cpu_addmm_out(out.get(), out.get(), left.get(), right.get(), beta, alpha));
}

Tensor new_workspace(const Tensor& like, int64_t rows, int64_t columns) {
  constexpr int64_t kHalfPage = 2048, kLine = 64;
  const auto bytes = static_cast<int64_t>(like.element_size());
  const bool is_shared =
      columns * bytes % kHalfPage == 0 && own_products_of(like) != Vectors::kNone;
  const Tensor memory = new_matrix(like, rows, columns + (is_shared ? kLine / bytes : 0));
  ask_for_large_pages(memory);
  return part(memory, 1, {0, columns});
}

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(
      "own_product_(Tensor(a!) out, Tensor a, Tensor b, float factor, bool add, int level) -> ()");
  m.def(
      "product_levels() -> (int float32, int bfloat16, int best, int best_bfloat16, bool timed, "
      "bool slow_bfloat16)");
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) { m.impl("own_product_", TORCH_BOX(&own_product)); }

STABLE_TORCH_LIBRARY_IMPL(fastqt, CompositeExplicitAutograd, m) {
  m.impl("product_levels", TORCH_BOX(&product_levels));
}

}  // namespace fastqt
