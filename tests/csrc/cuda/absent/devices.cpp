// Two CUDA devices that are not there, as far as torch asks; their tensors are in the host's
// memory.
//
// To be loaded before torch, which was built for CPUs.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

thread_local DeviceIndex current = 0;

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  Device exchangeDevice(Device device) const override {
    const Device before(c10::kCUDA, current);
    current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(c10::kCUDA, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return 2; }
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Allocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::malloc(bytes);
    return {memory, memory, &std::free, Device(c10::kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
Allocator allocator;

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Device(c10::kCUDA, current)));
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  return at::detail::empty_generic(sizes, &allocator, keys, dtype.value_or(at::kFloat), format);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("empty.memory_format", &empty); }

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {  // torch looks it up by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
