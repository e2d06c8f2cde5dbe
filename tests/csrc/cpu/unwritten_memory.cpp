// Loaded before torch: new memory holds NaN of every dtype, and torch's products, as the engine of
// the CPU calls them, refuse what those of some processors read: what lies between the lines of an
// operand of 16 bits.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<int64_t> operands{0};

// A function of torch, which Python has loaded where the linker does not look.
template <class Function>
Function* of_torch(Function*, const char* name) {
  static void* const library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

#define OF_TORCH(name) of_torch(decltype (&name)(nullptr), #name)

// Whether something other than 0 lies between the lines of a matrix, which are its rows or its
// columns.
bool has_gaps(AtenTensorHandle matrix) {
  int32_t dtype = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  void* data = nullptr;
  OF_TORCH(aoti_torch_get_dtype)(matrix, &dtype);
  if (dtype != OF_TORCH(aoti_torch_dtype_bfloat16)() &&
      dtype != OF_TORCH(aoti_torch_dtype_float16)())
    return false;
  OF_TORCH(aoti_torch_get_sizes)(matrix, &sizes);
  OF_TORCH(aoti_torch_get_strides)(matrix, &strides);
  OF_TORCH(aoti_torch_get_data_ptr)(matrix, &data);
  ++operands;

  const int line = strides[1] == 1 ? 0 : 1;
  if (strides[1 - line] != 1) return false;  // torch makes a copy itself
  const int64_t lines = sizes[line], length = sizes[1 - line], pitch = strides[line];
  if (pitch == length) return false;
  if (lines == 1) return true;
  const auto* const elements = static_cast<const uint16_t*>(data);
  for (int64_t i = 0; i + 1 < lines; ++i)
    for (int64_t j = length; j < pitch; ++j)
      if (elements[i * pitch + j] != 0) return true;
  return false;
}

}  // namespace

// How many operands of 16 bits there were.
extern "C" int64_t operands_of_16_bits() { return operands; }

extern "C" int posix_memalign(void** memory, size_t alignment, size_t size) {
  using Function = int (*)(void**, size_t, size_t);
  static const auto genuine = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "posix_memalign"));
  const int status = genuine(memory, alignment, size);
  if (status == 0) std::memset(*memory, 0xFF, size);
  return status;
}

extern "C" AOTITorchError aoti_torch_cpu_addmm_out(AtenTensorHandle out, AtenTensorHandle self,
                                                   AtenTensorHandle a, AtenTensorHandle b,
                                                   double beta, double alpha) {
  static const auto genuine = OF_TORCH(aoti_torch_cpu_addmm_out);
  if (has_gaps(a) || has_gaps(b)) {
    std::fputs("a product of 16 bits is given lines with something between them\n", stderr);
    return AOTI_TORCH_FAILURE;
  }
  return genuine(out, self, a, b, beta, alpha);
}
