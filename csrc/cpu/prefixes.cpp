// The sum of the losses of several prefixes of all embeddings on a CPU: one operator.
//
// The columns between one prefix and the next are a block. A chunk of whole rows holds the products
// of each block, s F_b G_b^T. Row by row, their running sums are the scores of the prefixes, each
// of which becomes the gradient of its products; the sums of these from the widest prefix down are
// what each block is multiplied by for the gradients of the embeddings. All prefixes together take
// 6 N M D operations. A prefix at norm 1 loses the part of its gradient that lies along itself,
// which follows from the sums over rows and columns of products of scores and gradients.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/checks.h"
#include "cpu/dtypes.h"
#include "cpu/matrix.h"
#include "cpu/norms.h"
#include "cpu/own_products.h"
#include "cpu/parallel.h"
#include "cpu/problem.h"
#include "cpu/problem_operators.h"
#include "cpu/row_passes.h"
#include "cpu/score_tile.h"

namespace fastqt {
namespace {

// What is known of one prefix.
template <class T>
struct Prefix {
  Range block;    // the columns of embeddings by which it is wider than the one before
  double weight;  // of its loss
  Tensor cells;   // of a chunk: the products of its block, then its gradient, then the sum of those
                  // not narrower
  std::vector<T> rows, columns;  // inverse norms, empty where scores are no cosines
  std::vector<double> row_weights, logsumexp, mass, loss;
  std::vector<T> along;  // of each column, the sum of products of scores and gradients
  std::vector<T> bias;   // the gradient, times the columns' inverse norms

  // What times a row or a column is taken off its gradient. One that is shorter is divided by a
  // constant.
  static T radial(double product, T inverse) {
    return inverse < static_cast<T>(1 / kLeastNorm) ? static_cast<T>(product * inverse * inverse)
                                                    : T(0);
  }
};

// Columns of scores, and the embeddings that they are of.
struct Columns {
  Tensor embeddings;
  std::optional<Tensor> gradient;
  Range range;
};

template <class T>
class PrefixWalk {
 public:
  PrefixWalk(const Problem& p, const std::vector<int64_t>& dims, const std::vector<double>& weights,
             const double* row_weights, const Gradients& gradients)
      : p_(p), gradients_(gradients), queries_(with_adjacent_columns(p.queries)), N_(p.rows()) {
    add_columns(p.candidates, gradients.candidates);
    if (p.negatives) add_columns(*p.negatives, gradients.negatives);
    cells_ = cells_of<T>(p, gradients);
    if (cells_.row_score_gradient != nullptr) {
      // What a row's own cell has of one prefix is added up apart.
      of_own_cells_ = std::exchange(cells_.row_score_gradient, nullptr);
      of_one_prefix_.resize(N_);
      cells_.row_score_gradient = of_one_prefix_.data();
      std::fill_n(of_own_cells_, N_, T(0));
    }
    wants_columns_ = gradients.candidates || gradients.negatives;
    wants_gradients_ =
        wants_columns_ || gradients.queries || gradients.scale || gradients.bias || of_own_cells_;
    for (std::size_t k = 0; k < dims.size(); ++k)
      prefixes_.push_back(prefix({k == 0 ? 0 : dims[k - 1], dims[k]}, weights[k], row_weights));
    if (p.normalize) find_norms();
    radial_.resize(prefixes_.size() * N_);
  }

  // Visits all rows, so many at a time.
  void run(int64_t rows) {
    rows = std::min(rows, N_);
    for (Prefix<T>& prefix : prefixes_) prefix.cells = new_workspace(queries_, rows, width_);
    if (gradients_.scale) products_ = new_matrix(queries_, rows, prefixes_.back().block.end);
    for_ranges(N_, rows, [&](Range range) {
      multiply_blocks(range);
      visit_rows(range);
      if (!wants_gradients_) return;
      // One prefix after the other, so that the second product finds its cells in the cache.
      for (const Prefix<T>& prefix : prefixes_) {
        add_to_queries(prefix, range);
        add_to_columns(prefix, range);
      }
      finish_queries(range);
    });
    finish();
  }

  // The weighted losses of the rows.
  Tensor losses() const {
    const Tensor made = new_tensor<1>({N_}, aoti_torch_dtype_float64());
    double* const total = made.mutable_data_ptr<double>();
    std::fill_n(total, N_, 0.0);
    for (const Prefix<T>& prefix : prefixes_)
      for (int64_t i = 0; i < N_; ++i) {
        double loss = prefix.loss[i];
        if (p_.link != kSigmoid)
          loss = prefix.mass[i] > 0 ? prefix.mass[i] * prefix.logsumexp[i] + loss : 0;
        total[i] += prefix.weight * loss;
      }
    return made;
  }

  Report report;

 private:
  void add_columns(const Tensor& embeddings, const std::optional<Tensor>& gradient) {
    columns_.push_back(
        {with_adjacent_columns(embeddings), gradient, {width_, width_ + embeddings.size(0)}});
    width_ = columns_.back().range.end;
    ask_for_large_pages(gradient);
  }

  Prefix<T> prefix(Range block, double weight, const double* row_weights) const {
    Prefix<T> made{block, weight, Tensor(), {}, {}, {}, {}, {}, {}, {}, {}};
    made.row_weights.resize(N_);
    for (int64_t i = 0; i < N_; ++i) made.row_weights[i] = weight * row_weights[i];
    made.logsumexp.resize(N_), made.loss.resize(N_);
    made.mass.resize(N_, p_.link == kLogSumExp ? 1 : 0);
    if (p_.normalize && wants_columns_) made.along.resize(width_);
    if (gradients_.bias) made.bias.resize(columns_.front().range.end);
    return made;
  }

  void find_norms() {
    for (Prefix<T>& prefix : prefixes_) prefix.rows.resize(N_), prefix.columns.resize(width_);
    find_norms(queries_, 0, &Prefix<T>::rows);
    for (const Columns& columns : columns_)
      find_norms(columns.embeddings, columns.range.begin, &Prefix<T>::columns);
  }

  void find_norms(const Tensor& matrix, int64_t first, std::vector<T> Prefix<T>::* factors) {
    const RowsOf<T> rows(matrix);
    in_parallel(matrix.size(0), rows.width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        double squares = 0;
        for (Prefix<T>& prefix : prefixes_) {
          for (int64_t d = prefix.block.begin; d < prefix.block.end; ++d)
            squares += static_cast<double>(rows[i][d]) * rows[i][d];
          const double norm = std::sqrt(squares);
          // A NaN stays, and no norm is counted as infinite.
          const double least = norm < kLeastNorm ? kLeastNorm : norm;
          const double none = std::numeric_limits<double>::quiet_NaN();
          (prefix.*factors)[first + i] = static_cast<T>(std::isinf(norm) ? none : 1 / least);
        }
      }
    });
  }

  static Tensor block_of(const Tensor& matrix, Range block) { return part(matrix, 1, block); }

  // The products of each block of columns for a chunk of rows.
  void multiply_blocks(Range range) const {
    const Tensor queries = part(queries_, 0, range);
    for (const Prefix<T>& prefix : prefixes_) {
      const Tensor cells = part(prefix.cells, 0, {0, range.size()});
      for (const Columns& columns : columns_)
        multiply(part(cells, 1, columns.range), block_of(queries, prefix.block),
                 transposed(block_of(columns.embeddings, prefix.block)), 0, p_.scale);
    }
  }

  // Sums over rows from `begin` on, which one thread has made.
  struct Sums {
    int64_t begin;
    std::vector<T> products;  // of the blocks of one row
    std::vector<std::vector<T>> along, bias;
  };

  // Turns the products of a chunk into what its blocks are multiplied by.
  void visit_rows(Range range) {
    std::mutex mutex;
    std::vector<Sums> of_threads;
    const auto cells_each = static_cast<int64_t>(prefixes_.size()) * width_;
    in_parallel(range.size(), cells_each, [&](int64_t begin, int64_t end) {
      Sums sums{begin, std::vector<T>(width_), {}, {}};
      for (const Prefix<T>& prefix : prefixes_) {
        sums.along.emplace_back(prefix.along.size());
        sums.bias.emplace_back(prefix.bias.size());
      }
      for (int64_t i = begin; i < end; ++i) visit_row(range.begin + i, i, sums);
      const std::lock_guard<std::mutex> lock(mutex);
      of_threads.push_back(std::move(sums));
    });

    // In the order of the rows, so that the sums have the same bits each time.
    std::sort(of_threads.begin(), of_threads.end(),
              [](const Sums& a, const Sums& b) { return a.begin < b.begin; });
    for (const Sums& sums : of_threads)
      for (std::size_t k = 0; k < prefixes_.size(); ++k) {
        row_add(prefixes_[k].along.data(), sums.along[k].data(), sums.along[k].size());
        row_add(prefixes_[k].bias.data(), sums.bias[k].data(), sums.bias[k].size());
      }
  }

  void visit_row(int64_t row, int64_t i, Sums& sums) {
    for (std::size_t k = 0; k < prefixes_.size(); ++k) {
      Prefix<T>& prefix = prefixes_[k];
      T* const cells = RowsOf<T>(prefix.cells)[i];
      if (k == 0) std::copy_n(cells, width_, sums.products.data());
      else row_running_sum(sums.products.data(), cells, width_);
      find_loss(prefix, row, cells);
      if (wants_gradients_) read_gradient(prefix, k, row, cells, sums);
    }
    if (!wants_gradients_) return;
    for (std::size_t k = prefixes_.size() - 1; k-- > 0;) {
      row_add(RowsOf<T>(prefixes_[k].cells)[i], RowsOf<T>(prefixes_[k + 1].cells)[i], width_);
      radial_[k * N_ + row] += radial_[(k + 1) * N_ + row];
    }
  }

  // The loss of a row, whose products become their gradient.
  void find_loss(Prefix<T>& prefix, int64_t row, T* cells) {
    Tile<T> tile{cells, width_, row, 1, 0, width_};
    if (p_.normalize)
      tile.row_factors = &prefix.rows[row], tile.column_factors = prefix.columns.data();
    if (p_.link == kSigmoid) {
      sigmoid_tile_backward(cells_, tile, prefix.row_weights.data(), prefix.loss.data(), report);
    } else {
      const RowSums sums{prefix.logsumexp.data(), prefix.mass.data(), prefix.loss.data()};
      softmax_rows(cells_, tile, prefix.row_weights.data(), sums, report);
    }
  }

  // Adds what the gradient of a row's products says of other gradients.
  void read_gradient(Prefix<T>& prefix, std::size_t k, int64_t row, const T* cells, Sums& sums) {
    const T factor = p_.normalize ? prefix.rows[row] : T(1);
    if (!prefix.bias.empty())
      row_multiple(sums.bias[k].data(), cells, prefix.bias.size(), 1 / factor, true);
    if (of_own_cells_ != nullptr) of_own_cells_[row] += of_one_prefix_[row];
    if (!p_.normalize) return;
    const T* const products = sums.products.data();
    const double along = prefix.along.empty()
                             ? row_dot(cells, products, width_)
                             : row_product_add(sums.along[k].data(), cells, products, width_);
    radial_[k * N_ + row] = Prefix<T>::radial(along, factor);
  }

  // Where the gradients of a chunk's queries are added up, without their scale if it has a gradient
  // itself.
  Tensor query_sums(Range range) const {
    return gradients_.scale ? part(products_, 0, {0, range.size()})
                            : part(*gradients_.queries, 0, range);
  }

  void add_to_queries(const Prefix<T>& prefix, Range range) const {
    if (!gradients_.queries && !gradients_.scale) return;
    const Tensor cells = part(prefix.cells, 0, {0, range.size()}),
                 out = block_of(query_sums(range), prefix.block);
    for (const Columns& columns : columns_)
      multiply(out, part(cells, 1, columns.range), block_of(columns.embeddings, prefix.block),
               columns.range.begin > 0, gradients_.scale ? 1 : p_.scale);
  }

  void add_to_columns(const Prefix<T>& prefix, Range range) const {
    const Tensor cells = part(prefix.cells, 0, {0, range.size()}),
                 queries = part(queries_, 0, range);
    for (const Columns& columns : columns_)
      if (columns.gradient)
        multiply(block_of(*columns.gradient, prefix.block),
                 transposed(part(cells, 1, columns.range)), block_of(queries, prefix.block),
                 range.begin > 0, p_.scale);
  }

  void finish_queries(Range range) {
    if (!gradients_.queries && !gradients_.scale) return;
    const bool apart = gradients_.scale.has_value();
    const RowsOf<T> f(queries_), from(query_sums(range));
    const int64_t D = prefixes_.back().block.end;
    std::vector<double> dots(range.size());
    in_parallel(range.size(), D, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (apart) dots[i] = row_dot(f[range.begin + i], from[i], D);
        if (gradients_.queries) finish_query(range.begin + i, from[i], apart);
      }
    });
    scale_ += std::accumulate(dots.begin(), dots.end(), 0.0);
  }

  // Writes the gradient of a row of the queries from that of its prefixes at norm 1.
  void finish_query(int64_t row, const T* products, bool apart) {
    T* const gradient = RowsOf<T>(*gradients_.queries)[row];
    const T* const f = RowsOf<T>(queries_)[row];
    const int64_t D = prefixes_.back().block.end;
    if (apart) row_multiple(gradient, products, D, static_cast<T>(p_.scale), false);
    std::fill(gradient + D, gradient + gradients_.queries->size(1), T(0));
    if (!p_.normalize) return;
    for (std::size_t k = 0; k < prefixes_.size(); ++k) {
      const Range block = prefixes_[k].block;
      row_multiple(gradient + block.begin, f + block.begin, block.size(), -radial_[k * N_ + row],
                   true);
    }
  }

  // Finishes the gradients once all rows have been visited.
  void finish() const {
    for (const Columns& columns : columns_)
      if (columns.gradient) finish_columns(columns);
    if (gradients_.scale) *gradients_.scale->template mutable_data_ptr<double>() = scale_;
    if (!gradients_.bias) return;
    T* const bias = gradients_.bias->template mutable_data_ptr<T>();
    for (std::size_t j = 0; j < prefixes_.front().bias.size(); ++j) {
      double total = 0;
      for (const Prefix<T>& prefix : prefixes_)
        total += prefix.bias[j] / (p_.normalize ? prefix.columns[j] : T(1));
      bias[j] = static_cast<T>(total);
    }
  }

  void finish_columns(const Columns& columns) const {
    const RowsOf<T> g(columns.embeddings), gradient(*columns.gradient);
    in_parallel(columns.range.size(), gradient.width, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        std::fill(gradient[j] + prefixes_.back().block.end, gradient[j] + gradient.width, T(0));
        if (!p_.normalize) continue;
        T radial = 0;
        const int64_t column = columns.range.begin + j;
        for (auto prefix = prefixes_.rbegin(); prefix != prefixes_.rend(); ++prefix) {
          radial += Prefix<T>::radial(prefix->along[column], prefix->columns[column]);
          const Range block = prefix->block;
          row_multiple(gradient[j] + block.begin, g[j] + block.begin, block.size(), -radial, true);
        }
      }
    });
  }

  const Problem& p_;
  const Gradients gradients_;
  const Tensor queries_;
  const int64_t N_;
  int64_t width_ = 0;
  bool wants_columns_ = false, wants_gradients_ = false;
  std::vector<Columns> columns_;
  std::vector<Prefix<T>> prefixes_;
  Cells<T> cells_{};
  std::vector<T>
      radial_;  // of each prefix, what times each row is taken off the gradient of its block
  std::vector<T> of_one_prefix_;  // the gradients of the cells that rows have alone
  T* of_own_cells_ = nullptr;     // the sums of these, or null
  Tensor products_;  // of a chunk and the candidates, where the scale's gradient is found from them
  double scale_ = 0;
};

void check_prefixes(const Problem& p, const std::vector<int64_t>& dims,
                    const std::vector<double>& weights) {
  const int64_t D = p.queries.size(1);
  STD_TORCH_CHECK(!p.row_negatives, "row_negatives: want None with prefixes, got a tensor");
  STD_TORCH_CHECK(!dims.empty() && dims.size() == weights.size(),
                  "prefix_weights: want one for each of the ", dims.size(),
                  " prefix_dims, at least one, got ", weights.size());
  for (std::size_t k = 0; k < dims.size(); ++k)
    STD_TORCH_CHECK(dims[k] > (k == 0 ? 0 : dims[k - 1]) && dims[k] <= D,
                    "prefix_dims: want ascending numbers in 1..", D, ", got ", dims[k]);
}

// The weighted sums of the losses of rows, (N,) float64, and the gradients of sum_i row_weights_i
// loss_i.
std::tuple<Tensor, std::vector<Tensor>, int64_t, int64_t, int64_t> prefix_loss(
    const Problem& p, const std::vector<int64_t> dims, const std::vector<double> weights,
    int64_t tile_rows, const Tensor row_weights, const std::vector<bool> needs) {
  check(p);
  check_queries(p.queries, false);
  check_tile(tile_rows, 1);
  check_prefixes(p, dims, weights);
  check_tensor("row_weights", row_weights, ScalarType::Double, {p.rows()}, Layout::kContiguous);
  const Gradients gradients = new_gradients(p, needs);
  const auto compute =
      [&]<class T>(T) -> std::tuple<Tensor, std::vector<Tensor>, int64_t, int64_t, int64_t> {
    PrefixWalk<T> walk(p, dims, weights, row_weights.const_data_ptr<double>(), gradients);
    walk.run(tile_rows);
    return {walk.losses(), present(gradients), walk.report.status, walk.report.row,
            walk.report.column};
  };
  return p.queries.scalar_type() == ScalarType::Double ? compute(double{}) : compute(float{});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fastqt, m) {
  m.def(("prefix_loss(" + kProblem +
         "int[] prefix_dims, float[] prefix_weights, int tile_rows, Tensor row_weights, bool[] "
         "needs) "
         "-> (Tensor loss, Tensor[] gradients, int status, int row, int column)")
            .c_str());
}

STABLE_TORCH_LIBRARY_IMPL(fastqt, CPU, m) {
  m.impl("prefix_loss", TORCH_BOX(&WithProblem<&prefix_loss>::call));
}

}  // namespace fastqt
