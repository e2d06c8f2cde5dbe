// A program that calls the vectorised passes of csrc/cpu for Python, which sends the arguments to
// its input and reads the results from its output. An emulator can run it, so that passes for
// another processor are tested here.
//
// A request is a name, "row_max float32", on a line of its own, and then each argument in 8 bytes:
// a number of integer type as an int64, one of floating-point type as a double; an array as its
// bytes, after an int64 that counts them. The answer is the result as a double, 0 where there is
// none, and the bytes of all arrays.
//
// An access beyond the end of an array ends the program. Its argument, if it has one, says how many
// bytes after an array may be read all the same.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/panel_product.h"
#include "cpu/row_passes.h"
#include "vector_functions.h"

namespace {

template <class T>
T received() {
  T value{};
  std::cin.read(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}

std::size_t slack = 0;

// The array of a request, before a page that may not be touched.
class Array {
 public:
  explicit Array(std::size_t bytes) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t whole = (bytes + slack + page - 1) / page * page;
    size_ = whole + page;
    pages_ = static_cast<char*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages_ == MAP_FAILED || mprotect(pages_ + whole, page, PROT_NONE) != 0) std::abort();
    data_ = pages_ + whole - slack - bytes;
    std::cin.read(data_, static_cast<std::streamsize>(bytes));
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { munmap(pages_, size_); }

  char* data() const { return data_; }
  void send() const { std::cout.write(data_, static_cast<std::streamsize>(bytes_)); }

 private:
  std::size_t bytes_, size_;
  char *pages_, *data_;
};

using Arrays = std::vector<std::unique_ptr<Array>>;

template <class A>
A argument(Arrays& arrays) {
  if constexpr (std::is_pointer_v<A>) {
    arrays.push_back(std::make_unique<Array>(received<int64_t>()));
    return reinterpret_cast<A>(arrays.back()->data());
  } else if constexpr (std::is_floating_point_v<A>) {
    return static_cast<A>(received<double>());
  } else {
    return static_cast<A>(received<int64_t>());
  }
}

template <class Signature>
struct Call;

template <class R, class... A>
struct Call<R(A...)> {
  R (*function)(A...);

  double operator()(Arrays& arrays) const {
    const std::tuple<A...> arguments{
        argument<A>(arrays)...};  // braces: in the order in which they arrive
    if constexpr (std::is_void_v<R>) {
      std::apply(function, arguments);
      return 0;
    } else {
      return std::apply(function, arguments);
    }
  }
};

std::map<std::string, std::function<double(Arrays&)>> functions;

template <class Signature>
void offer(const std::string& name, Signature* function) {
  functions[name] = Call<Signature>{function};
}

template <class T>
void offer_dtype(const std::string& dtype) {
#define FASTQT_OFFER(name, ...) offer<__VA_ARGS__>(#name " " + dtype, fastqt::name);
#define FASTQT_OFFER_MAP(name) FASTQT_OFFER(map_##name, void(T*, int64_t))
  FASTQT_FOR_FUNCTIONS(FASTQT_OFFER_MAP)
  FASTQT_OFFER(row_max, T(const T*, int64_t))
  FASTQT_OFFER(row_sum, double(const T*, int64_t))
  FASTQT_OFFER(row_exp_sum, double(const T*, int64_t, T))
  FASTQT_OFFER(row_exp, double(T*, int64_t, T))
  FASTQT_OFFER(row_softplus_sum, double(const T*, int64_t))
  FASTQT_OFFER(row_sigmoid, double(T*, int64_t, T, T))
  FASTQT_OFFER(row_add, void(T*, const T*, int64_t))
  FASTQT_OFFER(row_affine, void(T*, int64_t, T, T))
  FASTQT_OFFER(row_scale, void(T*, const T*, int64_t, T))
  FASTQT_OFFER(row_raise, void(T*, const T*, int64_t))
  FASTQT_OFFER(row_exp_add, void(T*, const T*, const T*, int64_t))
  FASTQT_OFFER(row_two_exps, void(T*, int64_t, T, T, const T*, const T*))
  FASTQT_OFFER(row_exclude_group, void(T*, const int64_t*, int64_t, int64_t))
  FASTQT_OFFER(row_dot, double(const T*, const T*, int64_t))
  FASTQT_OFFER(row_multiple, void(T*, const T*, int64_t, T, bool))
}

// Of bfloat16, which Python sends as uint16.
void offer_bfloat16() {
  using fastqt::BFloat16;
  offer<double(const BFloat16*, const BFloat16*, int64_t)>("row_dot uint16", fastqt::row_dot);
  offer<double(const BFloat16*, const float*, int64_t)>("row_dot_with_floats uint16",
                                                        fastqt::row_dot);
  offer<void(float*, const BFloat16*, int64_t, float, bool)>("row_multiple_of_bfloat16 float32",
                                                             fastqt::row_multiple);
  offer<void(BFloat16*, const float*, int64_t, float)>("row_round uint16", fastqt::row_round);
  offer<void(BFloat16*, const BFloat16*, int64_t, float)>("row_round_bfloat16 uint16",
                                                          fastqt::row_round);
}

int64_t best_vectors(float*) { return static_cast<int64_t>(fastqt::best_vectors()); }

void multiply_panels(float* out, const float* a, const float* b, int64_t stride,
                     int64_t a_row_stride, int64_t a_column_stride, int64_t b_row_stride,
                     int64_t b_column_stride, int64_t rows, int64_t columns, int64_t depth,
                     float factor, bool add, int64_t level) {
  fastqt::multiply_panels({{out, stride},
                           {a, a_row_stride, a_column_stride},
                           {b, b_row_stride, b_column_stride},
                           rows,
                           columns,
                           depth,
                           factor,
                           add},
                          static_cast<fastqt::Vectors>(level));
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) slack = std::strtoul(arguments[1], nullptr, 10);
  offer_dtype<float>("float32");
  offer_dtype<double>("float64");
  offer_bfloat16();
  offer("best_vectors float32", best_vectors);
  offer("multiply_panels float32", multiply_panels);
  std::string name;
  while (std::getline(std::cin, name)) {
    const auto found = functions.find(name);
    if (found == functions.end()) {
      std::cerr << "no function has the name " << name << std::endl;
      return 2;
    }
    Arrays arrays;
    const double result = found->second(arrays);
    std::cout.write(reinterpret_cast<const char*>(&result), sizeof result);
    for (const auto& array : arrays) array->send();
    std::cout.flush();
  }
}
