#include "cpu/panel_product.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

// The vectors of GCC and clang, and their shuffles, which GCC has from version 12 on. GCC for Windows keeps vectors of
// 32 bytes and more at addresses of the stack that are not aligned to them.
#if (defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)) && !(defined(_WIN32) && !defined(__clang__))
#if defined(__x86_64__)
#define FASTQT_PANELS_X86 1
#elif defined(__aarch64__)
#define FASTQT_PANELS_NEON 1
#endif
#endif

namespace fastqt {

PanelProduct PanelProduct::part(int64_t row, int64_t row_end, int64_t column, int64_t column_end) const {
  return {out + row * stride + column, stride, a.from(row, 0), b.from(0, column), row_end - row, column_end - column,
          depth, factor, add};
}

#if defined(FASTQT_PANELS_X86) || defined(FASTQT_PANELS_NEON)

namespace {

// A block of the product has at most so many rows and so much depth: its panels of a, 3 MB, are read from the cache
// by all panels of b. The panel of b at hand is 128 kB at most, and stays in the second level of the cache.
constexpr int64_t kBlockRows = 768, kBlockDepth = 1024;

// Memory of a thread that is kept, so that products of small matrices need none.
class Panels {
 public:
  float* of(int64_t size) {
    if (size > size_) {
      memory_.reset();
      memory_.reset(static_cast<float*>(::operator new(size * sizeof(float), kAlignment)));
      size_ = size;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(float* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<float[], Delete> memory_;
  int64_t size_ = 0;
};

// The rows [0, size) in parts of at most `most` rows, as equal as they can be.
struct Parts {
  Parts(int64_t size, int64_t most) : size(size), count(std::max<int64_t>(1, (size + most - 1) / most)) {}
  int64_t begin(int64_t part) const { return size * part / count; }
  int64_t longest() const { return (size + count - 1) / count; }

  int64_t size, count;
};

using TileFunction = void (*)(int64_t depth, const float* a, const float* b, const float& factor, bool add,
                              float* out, int64_t stride);

// Packs the panels of a in a block. Where the rows of a are adjacent in memory, the panels are filled side by side, a
// few columns of `a` at a time, so that what is read lies together.
FASTQT_INLINE void pack_panels(const Strided& a, const Parts& panels, int64_t depth, float* packed) {
  const int64_t columns = a.row_stride == 1 ? 8 : std::max<int64_t>(1, depth);
  for (int64_t k = 0; k < depth; k += columns) {
    const int64_t end = std::min(k + columns, depth);
    for (int64_t p = 0; p < panels.count; ++p) {
      const int64_t begin = panels.begin(p), rows = panels.begin(p + 1) - begin;
      pack_panel(a.from(begin, k), rows, end - k, packed + begin * depth + k * rows, rows);
    }
  }
}

// The functions for tiles of 1 to Shape::kVectors vectors, and for each of 1 to Shape::kRows rows.
template <class Level, int... kTile>
constexpr auto tiles_of(std::integer_sequence<int, kTile...>) {
  return std::array<TileFunction, sizeof...(kTile)>{&Level::template tile<kTile>...};
}

// Panels of b are made when they are needed: all panels of a are then multiplied by the one that is in the cache.
template <class Level>
FASTQT_INLINE void multiply_blocks(const PanelProduct& product) {
  using Shape = typename Level::Shape;
  constexpr auto kTiles = tiles_of<Level>(std::make_integer_sequence<int, Shape::kRows * Shape::kVectors>{});
  static thread_local Panels memory_of_a, memory_of_b;
  const Parts rows(product.rows, kBlockRows), depths(product.depth, kBlockDepth);
  float* const panels_of_a = memory_of_a.of(rows.longest() * depths.longest());
  float* const panel_of_b = memory_of_b.of(Shape::kColumns * depths.longest());

  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t row = rows.begin(r);
    const Parts panels(rows.begin(r + 1) - row, Shape::kRows);
    for (int64_t d = 0; d < depths.count; ++d) {
      const int64_t k = depths.begin(d), depth = depths.begin(d + 1) - k;
      const bool add = product.add || d > 0;
      pack_panels(product.a.from(row, k), panels, depth, panels_of_a);

      for (int64_t j = 0; j < product.columns; j += Shape::kColumns) {
        const int64_t columns = std::min<int64_t>(Shape::kColumns, product.columns - j);
        const int64_t vectors = (columns + Shape::kLanes - 1) / Shape::kLanes, width = vectors * Shape::kLanes;
        pack_panel(product.b.from(k, j).transposed(), columns, depth, panel_of_b, width);

        for (int64_t p = 0; p < panels.count; ++p) {
          const int64_t i = panels.begin(p), height = panels.begin(p + 1) - i;
          const TileFunction tile = kTiles[(vectors - 1) * Shape::kRows + height - 1];
          const float* const panel_of_a = panels_of_a + i * depth;
          float* const out = product.out + (row + i) * product.stride + j;
          if (columns == width) {
            tile(depth, panel_of_a, panel_of_b, product.factor, add, out, product.stride);
            continue;
          }

          // The tile reaches beyond the last column.
          float whole[Shape::kRows * Shape::kColumns];
          tile(depth, panel_of_a, panel_of_b, product.factor, false, whole, width);
          for (int64_t y = 0; y < height; ++y)
            for (int64_t x = 0; x < columns; ++x)
              out[y * product.stride + x] = whole[y * width + x] + (add ? out[y * product.stride + x] : 0.0f);
        }
      }
    }
  }
}

// All that is inlined into the functions of a level is compiled for its vector instructions.
#define FASTQT_LEVEL(NAME, TARGET, LANES, ROWS, VECTORS)                                                       \
  struct NAME {                                                                                                \
    using Shape = TileShape<LANES, ROWS, VECTORS>;                                                             \
                                                                                                               \
    template <int kTile>                                                                                       \
    TARGET static void tile(int64_t depth, const float* a, const float* b, const float& factor, bool add,      \
                            float* out, int64_t stride) {                                                      \
      tile_product<Shape, kTile % ROWS + 1, kTile / ROWS + 1>(depth, a, b, factor, add, out, stride);          \
    }                                                                                                          \
                                                                                                               \
    TARGET static void multiply(const PanelProduct& product) { multiply_blocks<NAME>(product); }               \
  }

#ifdef FASTQT_PANELS_X86
// Tiles have as many rows as leave two registers for the columns and one for a broadcast.
FASTQT_LEVEL(Avx512, __attribute__((target("avx512f,fma"))), 16, 14, 2);
FASTQT_LEVEL(Avx2, __attribute__((target("avx2,fma"))), 8, 6, 2);
#else
FASTQT_LEVEL(Neon, , 4, 8, 3);
#endif

}  // namespace

Vectors best_vectors() {
#ifdef FASTQT_PANELS_X86
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Vectors::kNone;
  return __builtin_cpu_supports("avx512f") ? Vectors::kAvx512 : Vectors::kAvx2;
#else
  return Vectors::kNeon;
#endif
}

void multiply_panels(const PanelProduct& product, [[maybe_unused]] Vectors level) {
#ifdef FASTQT_PANELS_X86
  return level == Vectors::kAvx512 ? Avx512::multiply(product) : Avx2::multiply(product);
#else
  return Neon::multiply(product);
#endif
}

#else

Vectors best_vectors() { return Vectors::kNone; }
void multiply_panels(const PanelProduct&, Vectors) {}

#endif

}  // namespace fastqt
