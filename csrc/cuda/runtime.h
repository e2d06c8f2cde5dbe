// What operators ask of the CUDA runtime: checked calls, on the device of their tensors and its
// current stream.
//
// This library links a runtime of its own beside torch's. What torch's guards make the current
// device is that of torch's runtime, and need not be the one that a launch of this one goes to.
#pragma once

#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/Exception.h>

// Not there in a torch without CUDA, in which this library must load all the same.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#pragma weak aoti_torch_get_current_cuda_stream

namespace fastqt::cuda {

inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // so that the next call does not report it once more
  STD_TORCH_CHECK(false, call, ": ", cudaGetErrorName(status), ", ", cudaGetErrorString(status));
}
#define FASTQT_CHECK(call, ...) ::fastqt::cuda::check(call(__VA_ARGS__), #call)

// The stream that torch gives the work on a device to.
inline cudaStream_t current_stream(int device) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "backend='cuda': want a torch that was built with CUDA, got one without "
                  "aoti_torch_get_current_cuda_stream");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Does `work` while a device is this runtime's current one, and makes the former one current again.
template <class Work>
void on_device(int device, const Work& work) {
  int before = device;
  FASTQT_CHECK(cudaGetDevice, &before);
  if (before == device) return work();
  FASTQT_CHECK(cudaSetDevice, device);
  try {
    work();
  } catch (...) {
    static_cast<void>(cudaSetDevice(before));  // The error of the work says more than one of this.
    throw;
  }
  FASTQT_CHECK(cudaSetDevice, before);
}

}  // namespace fastqt::cuda
