#include "cpu/panel_product.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "cpu/panel_packing.h"
#include "cpu/tile_product.h"

namespace fastqt {

PanelProduct PanelProduct::part(int64_t row, int64_t row_end, int64_t column,
                                int64_t column_end) const {
  return {out.from(row, column),
          a.from(row, 0),
          b.from(0, column),
          row_end - row,
          column_end - column,
          depth,
          factor,
          add,
          packed_b,
          first_column + column,
          all_columns};
}

#ifdef FASTQT_PANELS

namespace {

// Where a tile finds its rows of a: at `data`, `stride` elements from one column to the next, or
// from one row to the next where the elements of a row are adjacent.
template <class Element>
struct TileRows {
  const Element* data;
  int64_t stride;
  bool has_adjacent_columns = false;
};

// Memory of a thread that is kept, so that products of small matrices need none.
class Memory {
 public:
  template <class Element>
  Element* of(int64_t size) {
    const int64_t bytes = size * static_cast<int64_t>(sizeof(Element));
    if (bytes > bytes_) {
      memory_.reset();
      memory_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
      bytes_ = bytes;
    }
    return reinterpret_cast<Element*>(memory_.get());
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<std::byte, Delete> memory_;
  int64_t bytes_ = 0;
};

// The rows [0, size) in parts of at most `most` rows, as equal as they can be: all but the last
// begin at multiples of `unit`.
struct Parts {
  Parts(int64_t size, int64_t most, int64_t unit = 1)
      : size(size), count(std::max<int64_t>(1, (size + most - 1) / most)), unit(unit),
        units((size + unit - 1) / unit) {}
  int64_t begin(int64_t part) const { return std::min(units * part / count * unit, size); }
  int64_t longest() const { return (units + count - 1) / count * unit; }

  int64_t size, count, unit, units;
};

// The blocks of the depth of a product. Those of pairs begin at even numbers.
template <class Shape>
struct Depths {
  explicit Depths(int64_t depth)
      : depth(depth), parts(Shape::elements(depth), Shape::kBlockElements, Shape::kUnit) {}
  int64_t begin(int64_t block) const {
    return std::min(parts.begin(block) * (Shape::kPairs ? 2 : 1), depth);
  }

  int64_t depth;
  Parts parts;
};

template <class Shape, int kRows, int kVectors, class Element>
FASTQT_INLINE void sums_of_tile(int64_t depth, const TileRows<Element>& a, const Element* b,
                                const float& factor, const Rows* from, const Rows& to) {
  if constexpr (!Shape::kPairs) {
    if (a.has_adjacent_columns)
      return tile_product<Shape, kRows, kVectors>(depth, AdjacentColumns(a.data, a.stride), b,
                                                  factor, from, to);
  }
  tile_product<Shape, kRows, kVectors>(depth, AdjacentRows<Element, kRows>(a.data, a.stride), b,
                                       factor, from, to);
}

template <class Element>
using TileFunction = void (*)(int64_t depth, const TileRows<Element>& a, const Element* b,
                              const float& factor, const Rows* from, const Rows& to);

// The columns that the vectors of a panel have.
template <class Shape>
FASTQT_INLINE int64_t padded(int64_t columns) {
  return (columns + Shape::kLanes - 1) / Shape::kLanes * Shape::kLanes;
}

// Packs `columns` columns of b to a panel, and the elements beyond its depth, of which whole units
// are multiplied, with 0.
template <class Shape>
FASTQT_INLINE void pack_panel_of_b(const Strided& b, int64_t columns, int64_t depth,
                                   typename Shape::Element* packed) {
  const int64_t width = padded<Shape>(columns);
  pack_panel<Shape::kLanes>(b.transposed(), columns, depth, packed, width);
  const int64_t elements = Shape::kPairs ? (depth + 1) / 2 : depth;
  std::fill(packed + elements * width, packed + Shape::elements(depth) * width, 0);
}

// Packs the panels of a in a block. Where the rows of a are adjacent in memory, the panels are
// filled side by side, a few columns of `a` at a time, so that what is read lies together.
template <class Shape>
FASTQT_INLINE void pack_panels_of(const Strided& a, const Parts& panels, int64_t depth,
                                  typename Shape::Element* packed) {
  const int64_t step = a.row_stride == 1 ? 8 : std::max<int64_t>(1, depth);
  for (int64_t k = 0; k < depth; k += step) {
    const int64_t columns = std::min(step, depth - k);
    for (int64_t p = 0; p < panels.count; ++p) {
      const int64_t begin = panels.begin(p), rows = panels.begin(p + 1) - begin;
      pack_panel<Shape::kLanes>(a.from(begin, k), rows, columns,
                                packed + begin * Shape::elements(depth) + Shape::elements(k) * rows,
                                rows);
    }
  }
}

// A function for each number of vectors, 1 to Shape::kVectors, and of rows, 1 to Shape::kRows.
template <class Level, int... kTile>
constexpr auto tiles_of(std::integer_sequence<int, kTile...>) {
  return std::array<TileFunction<typename Level::Shape::Element>, sizeof...(kTile)>{
      &Level::template tile<kTile>...};
}

// Multiplies `height` rows of a by a panel of b with `columns` columns to a tile of the result,
// which is added to `from` if there is one.
template <class Level, class Element>
FASTQT_INLINE void multiply_panel(const TileRows<Element>& a, int64_t height,
                                  const Element* panel_of_b, int64_t columns, int64_t elements,
                                  const float& factor, const Rows* from, const Rows& to) {
  using Shape = typename Level::Shape;
  const int64_t width = padded<Shape>(columns);
  const TileFunction<Element> tile = Level::tile_of(height, width / Shape::kLanes);
  if (columns == width) return tile(elements, a, panel_of_b, factor, from, to);

  // The tile reaches beyond the last column. Its sums are added in the order of all others, so that
  // they do not depend on how threads have shared the columns.
  float whole[Shape::kRows * Shape::kColumns];
  for (int64_t y = 0; from != nullptr && y < height; ++y) {
    std::copy_n(from->at<float>(y, 0), columns, whole + y * width);
    std::fill(whole + y * width + columns, whole + (y + 1) * width, 0.0f);
  }
  const Rows sums{whole, width};
  tile(elements, a, panel_of_b, factor, from == nullptr ? nullptr : &sums, sums);
  for (int64_t y = 0; y < height; ++y) {
    if (!to.is_bfloat16) {
      std::copy_n(whole + y * width, columns, to.at<float>(y, 0));
    } else {
      for (int64_t x = 0; x < columns; ++x)
        to.at<uint16_t>(y, 0)[x] = static_cast<uint16_t>(
            rounded_upper_half(std::bit_cast<uint32_t>(whole[y * width + x])) >> 16);
    }
  }
}

// Panels of b that were not packed before are made when they are needed: all panels of a are then
// multiplied by the one that is in the cache. The sums of a result in bfloat16 are kept in float32
// until the last block of the depth.
template <class Level>
FASTQT_INLINE void multiply_blocks(const PanelProduct& product) {
  using Shape = typename Level::Shape;
  using Element = typename Shape::Element;
  static thread_local Memory memory_of_a, memory_of_b, memory_of_sums;
  const Parts rows(product.rows, Shape::kBlockRows, Shape::kRowUnit);
  const Depths<Shape> depths(product.depth);
  Element* const panels_of_a = memory_of_a.of<Element>(rows.longest() * depths.parts.longest());
  const auto* const packed = reinterpret_cast<const Element*>(product.packed_b);
  const bool has_sums = product.out.is_bfloat16 && depths.parts.count > 1;
  float* const sums =
      has_sums ? memory_of_sums.of<float>(rows.longest() * product.columns) : nullptr;
  Element* const made =
      packed ? nullptr : memory_of_b.of<Element>(Shape::kColumns * depths.parts.longest());

  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t row = rows.begin(r);
    const Parts panels(rows.begin(r + 1) - row, Shape::kRows, Shape::kRowUnit);
    const Rows out = product.out.from(row, 0), kept = has_sums ? Rows{sums, product.columns} : out;
    for (int64_t d = 0; d < depths.parts.count; ++d) {
      const int64_t k = depths.begin(d), depth = depths.begin(d + 1) - k,
                    elements = Shape::elements(depth);
      const bool add = product.add || d > 0;
      const Rows& destination = d + 1 == depths.parts.count ? out : kept;
      Level::pack_panels(product.a.from(row, k), panels, depth, panels_of_a);

      for (int64_t j = 0; j < product.columns; j += Shape::kColumns) {
        const int64_t columns = std::min<int64_t>(Shape::kColumns, product.columns - j);
        const Element* panel_of_b = made;
        if (packed != nullptr) {
          const int64_t column = product.first_column + j;
          panel_of_b = packed + depths.parts.begin(d) * padded<Shape>(product.all_columns) +
                       column * elements;
        } else {
          pack_panel_of_b<Shape>(product.b.from(k, j), columns, depth, made);
        }

        for (int64_t p = 0; p < panels.count; ++p) {
          const int64_t i = panels.begin(p), height = panels.begin(p + 1) - i;
          const Rows from = kept.from(i, j);
          multiply_panel<Level>(TileRows<Element>{panels_of_a + i * elements, height}, height,
                                panel_of_b, columns, elements, product.factor,
                                add ? &from : nullptr, destination.from(i, j));
        }
      }
    }
  }
}

// Whether tiles read a where it is. A panel of it pays where many panels of b are multiplied by it;
// pairs of bfloat16 have to be made anyway. Rows that are a multiple of a page apart lie in a few
// lines of the first level of the cache, which does not hold those of a tile.
template <class Shape>
bool is_read_in_place(const PanelProduct& product) {
  constexpr int64_t kMostColumns = 256, kPage = 4096 / sizeof(float);
  const Strided& a = product.a;
  if (Shape::kPairs || product.packed_b != nullptr || product.columns > kMostColumns) return false;
  return a.row_stride == 1 || (a.column_stride == 1 && a.row_stride % kPage != 0);
}

// A product whose a is read in place. All panels of b of a block stay in the second level of the
// cache, so that each tile's rows of a, which stay in the first one, come from the memory once for
// them all.
template <class Level>
FASTQT_INLINE void multiply_in_place(const PanelProduct& product) {
  using Shape = typename Level::Shape;
  static thread_local Memory memory;
  const Parts panels(product.rows, Shape::kRows), depths(product.depth, Shape::kBlockElements);
  auto* const packed = memory.of<float>(padded<Shape>(product.columns) * depths.longest());
  const bool has_adjacent_columns = product.a.row_stride != 1;

  for (int64_t d = 0; d < depths.count; ++d) {
    const int64_t k = depths.begin(d), depth = depths.begin(d + 1) - k;
    for (int64_t j = 0; j < product.columns; j += Shape::kColumns) {
      const int64_t columns = std::min<int64_t>(Shape::kColumns, product.columns - j);
      pack_panel_of_b<Shape>(product.b.from(k, j), columns, depth, packed + j * depth);
    }

    for (int64_t p = 0; p < panels.count; ++p) {
      const int64_t i = panels.begin(p), height = panels.begin(p + 1) - i;
      const TileRows<float> rows{
          product.a.at(i, k), has_adjacent_columns ? product.a.row_stride : product.a.column_stride,
          has_adjacent_columns};
      for (int64_t j = 0; j < product.columns; j += Shape::kColumns) {
        const Rows to = product.out.from(i, j);
        multiply_panel<Level>(rows, height, packed + j * depth,
                              std::min<int64_t>(Shape::kColumns, product.columns - j), depth,
                              product.factor, product.add || d > 0 ? &to : nullptr, to);
      }
    }
  }
}

template <class Shape>
FASTQT_INLINE void pack_all(const Strided& b, int64_t depth, int64_t columns, std::byte* packed) {
  const Depths<Shape> depths(depth);
  for (int64_t d = 0; d < depths.parts.count; ++d) {
    const int64_t k = depths.begin(d), terms = depths.begin(d + 1) - k;
    auto* const block = reinterpret_cast<typename Shape::Element*>(packed) +
                        depths.parts.begin(d) * padded<Shape>(columns);
    for (int64_t j = 0; j < columns; j += Shape::kColumns) {
      const int64_t width = std::min<int64_t>(Shape::kColumns, columns - j);
      pack_panel_of_b<Shape>(b.from(k, j), width, terms, block + j * Shape::elements(terms));
    }
  }
}

// All that is inlined into the functions of a level is compiled for its vector instructions.
#define FASTQT_LEVEL(NAME, TARGET, ELEMENT, LANES, ROWS, VECTORS)                                  \
  struct NAME {                                                                                    \
    using Shape = TileShape<ELEMENT, LANES, ROWS, VECTORS>;                                        \
                                                                                                   \
    template <int kTile>                                                                           \
    TARGET static void tile(int64_t depth, const TileRows<ELEMENT>& a, const ELEMENT* b,           \
                            const float& factor, const Rows* from, const Rows& to) {               \
      sums_of_tile<Shape, kTile % ROWS + 1, kTile / ROWS + 1>(depth, a, b, factor, from, to);      \
    }                                                                                              \
                                                                                                   \
    static TileFunction<ELEMENT> tile_of(int64_t rows, int64_t vectors) {                          \
      constexpr auto kTiles = tiles_of<NAME>(std::make_integer_sequence<int, ROWS * VECTORS>{});   \
      return kTiles[(vectors - 1) * ROWS + rows - 1];                                              \
    }                                                                                              \
                                                                                                   \
    TARGET static void pack_panels(const Strided& a, const Parts& panels, int64_t depth,           \
                                   ELEMENT* packed) {                                              \
      pack_panels_of<Shape>(a, panels, depth, packed);                                             \
    }                                                                                              \
                                                                                                   \
    TARGET static void multiply(const PanelProduct& product) {                                     \
      if constexpr (!Shape::kPairs) {                                                              \
        if (is_read_in_place<Shape>(product)) return multiply_in_place<NAME>(product);             \
      }                                                                                            \
      multiply_blocks<NAME>(product);                                                              \
    }                                                                                              \
    TARGET static void pack(const Strided& b, int64_t depth, int64_t columns, std::byte* packed) { \
      pack_all<Shape>(b, depth, columns, packed);                                                  \
    }                                                                                              \
  }

#ifdef FASTQT_PANELS_X86
// Tiles have as many rows as leave two registers for the columns and one for a broadcast.
FASTQT_LEVEL(Avx512, __attribute__((target("avx512f,fma"))), float, 16, 14, 2);
FASTQT_LEVEL(Avx2, __attribute__((target("avx2,fma"))), float, 8, 6, 2);
#ifdef FASTQT_PANELS_ASSEMBLY
FASTQT_LEVEL(Avx512Bfloat16, __attribute__((target("avx512f,fma"))), uint32_t, 16, 14, 2);
#endif
#ifdef FASTQT_TILE_PRODUCTS

#define FASTQT_OF_TILES __attribute__((target("avx512f,fma")))

struct Amx {
  using Shape = TilesShape;

  // The rows of a tile are the stride of its panel.
  template <int kVectors>
  FASTQT_OF_TILES static void tile(int64_t elements, const TileRows<uint32_t>& a, const uint32_t* b,
                                   const float& factor, const Rows* from, const Rows& to) {
    tiles_product<kVectors>(elements, a.data, a.stride, b, factor, from, to);
  }

  static TileFunction<uint32_t> tile_of(int64_t, int64_t vectors) {
    return vectors == 1 ? &tile<1> : &tile<2>;
  }

  // As `pack_panels_of`: where the rows of a are adjacent in memory, a few of its columns at a
  // time.
  FASTQT_OF_TILES static void pack_panels(const Strided& a, const Parts& panels, int64_t depth,
                                          uint32_t* packed) {
    const int64_t elements = Shape::elements(depth);
    const int64_t step = a.row_stride == 1 ? 32 : std::max<int64_t>(1, depth);
    for (int64_t k = 0; k < depth; k += step) {
      for (int64_t p = 0; p < panels.count; ++p) {
        const int64_t begin = panels.begin(p), rows = panels.begin(p + 1) - begin;
        pack_tiles(a.from(begin, k), rows, std::min(step, depth - k), elements * 16,
                   packed + begin * elements + Shape::elements(k) * 16);
      }
    }
  }

  FASTQT_OF_TILES static void multiply(const PanelProduct& product) {
    const Tiles tiles;
    multiply_blocks<Amx>(product);
  }

  FASTQT_OF_TILES static void pack(const Strided& b, int64_t depth, int64_t columns,
                                   std::byte* packed) {
    pack_all<Shape>(b, depth, columns, packed);
  }
};
#endif
#else
FASTQT_LEVEL(Neon, , float, 4, 8, 3);
#endif

// Calls visit(Level{}) with the struct of a level.
template <class F>
auto with_level([[maybe_unused]] Vectors level, const F& visit) {
#ifdef FASTQT_PANELS_X86
  switch (level) {
    case Vectors::kAvx512: return visit(Avx512{});
#ifdef FASTQT_PANELS_ASSEMBLY
    case Vectors::kAvx512Bfloat16: return visit(Avx512Bfloat16{});
#endif
#ifdef FASTQT_TILE_PRODUCTS
    case Vectors::kAmx: return visit(Amx{});
#endif
    default: return visit(Avx2{});
  }
#else
  return visit(Neon{});
#endif
}

}  // namespace

Vectors best_vectors() {
#ifdef FASTQT_PANELS_X86
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Vectors::kNone;
  return __builtin_cpu_supports("avx512f") ? Vectors::kAvx512 : Vectors::kAvx2;
#else
  return Vectors::kNeon;
#endif
}

bool has_bfloat16_vectors() {
#ifdef FASTQT_PANELS_ASSEMBLY
  return best_vectors() == Vectors::kAvx512 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

bool has_tiles() {
#ifdef FASTQT_TILE_PRODUCTS
  return Tiles::available();
#else
  return false;
#endif
}

int64_t panel_columns(Vectors level) {
  return with_level(level, []<class Level>(Level) -> int64_t { return Level::Shape::kColumns; });
}

int64_t packed_bytes(int64_t depth, int64_t columns, Vectors level) {
  return with_level(level, [&]<class Level>(Level) -> int64_t {
    using Shape = typename Level::Shape;
    return Shape::elements(depth) * padded<Shape>(columns) *
           static_cast<int64_t>(sizeof(typename Shape::Element));
  });
}

void pack_columns(const Strided& b, int64_t depth, int64_t columns, std::byte* packed,
                  Vectors level) {
  with_level(level, [&]<class Level>(Level) { Level::pack(b, depth, columns, packed); });
}

void multiply_panels(const PanelProduct& product, Vectors level) {
  // The sums of a deep product in bfloat16 take memory of their own, which is that of so many
  // columns at most.
  constexpr int64_t kColumnsOfSums = 1024;
  with_level(level, [&]<class Level>(Level) {
    using Shape = typename Level::Shape;
    const bool has_sums =
        product.out.is_bfloat16 && Shape::elements(product.depth) > Shape::kBlockElements;
    const int64_t step = has_sums ? kColumnsOfSums : std::max<int64_t>(1, product.columns);
    for (int64_t j = 0; j < product.columns; j += step)
      Level::multiply(product.part(0, product.rows, j, std::min(j + step, product.columns)));
  });
}

#else

Vectors best_vectors() { return Vectors::kNone; }
bool has_bfloat16_vectors() { return false; }
bool has_tiles() { return false; }
int64_t panel_columns(Vectors) { return 1; }
int64_t packed_bytes(int64_t, int64_t, Vectors) { return 0; }
void pack_columns(const Strided&, int64_t, int64_t, std::byte*, Vectors) {}
void multiply_panels(const PanelProduct&, Vectors) {}

#endif

}  // namespace fastqt
