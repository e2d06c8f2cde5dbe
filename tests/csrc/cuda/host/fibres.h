// Executes a grid of CUDA threads on one CPU thread. Each CUDA thread is a fibre, which runs until
// it must wait for others.
//
// The order is random, and as unfair as that of a GPU may be: a warp runs, its lanes in any order,
// until all of its lanes wait at a barrier of their block or grid, and only then another warp runs.
// A missing barrier, which a GPU might not show for a long time, gives wrong results here at once.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <ucontext.h>

namespace fastqt::host {

struct Copy {
  void* to;
  const void* from;
  int bytes;
  int group;
};

struct Fibre {
  int block, thread;
  ucontext_t context;
  jmp_buf jump;
  bool started = false;
  unsigned char* stack;
  std::vector<Copy> copies;  // asynchronous ones that are not carried out yet
  int groups = 0;            // number of groups of copies that were committed

  int lane() const { return thread % 32; }
};

// The inputs and outputs of the lanes of a warp, for an operation that they carry out together.
struct Warp {
  int arrived = 0;
  const char* operation = nullptr;
  const void* inputs[32];
  void* outputs[32];
  std::vector<Fibre*> runnable;
  Fibre* lanes[32];
};

class Grid {
 public:
  Grid(int blocks, int threads, int shared_bytes, uint64_t seed);
  ~Grid();

  // Runs `body` in every thread. Returns what went wrong, empty if nothing did.
  std::string run(const std::function<void()>& body);

  void sync_block();
  int arrive_at_grid();  // returns the number of the barrier
  void await_grid(int barrier);
  unsigned char* shared_memory();
  bool coin() { return random_() & 1; }
  [[noreturn]] void fail(const std::string& what);

  // All lanes of a warp call this. The last of them calls `compute(inputs, outputs)` once for all.
  template <class In, class Out, class F>
  Out together(const char* operation, const In& in, const F& compute) {
    Out out{};
    Warp& warp = warps_[self->block * warps_per_block_ + self->thread / 32];
    if (warp.arrived == 0) warp.operation = operation;
    if (warp.operation != operation)
      fail(std::string(operation) + " meets " + warp.operation + " in a warp");
    warp.inputs[self->lane()] = &in;
    warp.outputs[self->lane()] = &out;
    if (++warp.arrived < 32) {
      wait();
    } else {
      warp.arrived = 0;
      compute(reinterpret_cast<const In* const*>(warp.inputs),
              reinterpret_cast<Out* const*>(warp.outputs));
      for (Fibre* lane : warp.lanes)
        if (lane != self) wake(lane);
    }
    return out;
  }

  Fibre* self = nullptr;
  int blocks, threads;

 private:
  static void enter();
  void wait();
  void wake(Fibre* fibre);
  [[noreturn]] void switch_to(Fibre* fibre);
  [[noreturn]] void leave();
  [[noreturn]] void finish();
  Fibre* next();
  void arrive(int& arrived, int expected, int first_fibre);

  const int warps_per_block_, shared_bytes_;
  std::mt19937_64 random_;
  std::function<void()> body_;
  std::vector<Fibre> fibres_;
  std::vector<Warp> warps_;
  std::vector<int> runnable_warps_;
  std::vector<unsigned char*> shared_;
  std::vector<int> arrived_in_block_;
  int arrived_in_grid_ = 0, grid_barrier_ = 0, finished_ = 0, turn_ = -1;
  std::vector<Fibre*> waiting_in_grid_;
  std::string error_;
  jmp_buf outside_jump_;
  const void* outside_stack_ = nullptr;
  size_t outside_bytes_ = 0;
};

extern Grid* grid;

}  // namespace fastqt::host
