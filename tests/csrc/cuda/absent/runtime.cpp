// What cuda_runtime.h declares beside this file. Its current device is its own, as that of a
// runtime that is linked statically is: what torch makes the current device does not reach it.
#include "cuda_runtime.h"

#include <string>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace {

int current = 0;
std::string noted, failing;  // the calls since the last question, and the call that is to fail

cudaError_t note(const std::string& call, const std::string& details) {
  noted += call + details + "; ";
  return call == failing ? cudaErrorLaunchFailure : cudaSuccess;
}
std::string here() { return " on " + std::to_string(current); }

}  // namespace

extern "C" {

// The calls since the last question; from now on `call` fails.
const char* calls(const char* call) {
  static std::string last;
  last = noted;
  noted.clear();
  failing = call;
  return last.c_str();
}
int current_device() { return current; }

#ifdef WITH_STREAMS
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream) {
  *stream = reinterpret_cast<void*>(uintptr_t(1000 + device_index));
  return AOTI_TORCH_SUCCESS;
}
#endif

}  // extern "C"

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorLaunchFailure"; }
const char* cudaGetErrorString(cudaError_t) { return "as the test wants it"; }
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return failing == "cudaGetDevice" ? cudaErrorLaunchFailure : cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  const cudaError_t status = note("cudaSetDevice", " " + std::to_string(device));
  if (status == cudaSuccess) current = device;
  return status;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  *value = 2 + device;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return note("cudaFuncSetAttribute", here());
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return note("cudaOccupancyMaxActiveBlocksPerMultiprocessor", here());
}
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3 blocks, dim3, void**, size_t,
                                        cudaStream_t stream) {
  return note("cudaLaunchCooperativeKernel", here() + ", stream " +
                                                 std::to_string(uintptr_t(stream)) + ", blocks " +
                                                 std::to_string(blocks.x));
}
