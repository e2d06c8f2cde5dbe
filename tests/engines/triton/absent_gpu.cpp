// A CUDA device that is not there, as far as torch asks for one. To be loaded before torch.
//
// Torch's fake tensors may be on any device, but autograd asks for that device's streams, which a
// torch that was built for CPUs has none of. With this it finds a device that has one stream, on
// which nothing is done.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device kDevice(c10::kCUDA, 0);

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> {
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {  // torch looks it up by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
