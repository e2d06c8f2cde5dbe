// torch's parallel_for on threads that ThreadSanitizer understands. It always uses several, and
// none of OpenMP's, whose barriers are unknown to the sanitizer.
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <thread>
#include <vector>

extern "C" AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc body,
                                             void* context) {
  constexpr int64_t kThreads = 4;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < kThreads; ++t) {
    const int64_t from = begin + (end - begin) * t / kThreads,
                  to = begin + (end - begin) * (t + 1) / kThreads;
    if (from < to) threads.emplace_back([=] { body(from, to, context); });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}
