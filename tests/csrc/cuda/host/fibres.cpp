#include "fibres.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace fastqt::host {
namespace {

constexpr size_t kStackBytes = 256 * 1024;

// Stacks are kept for the next grid, so that their pages are faulted in only once.
std::vector<unsigned char*>& free_stacks() {
  static std::vector<unsigned char*> stacks;
  return stacks;
}

unsigned char* take_stack() {
  auto& stacks = free_stacks();
  if (stacks.empty()) {
    void* fresh = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh == MAP_FAILED) std::abort();
    return static_cast<unsigned char*>(fresh);
  }
  unsigned char* stack = stacks.back();
  stacks.pop_back();
  return stack;
}

// AddressSanitizer must be told which stack is in use.
#if defined(__SANITIZE_ADDRESS__)
void announce_switch(const void* stack, size_t bytes) {
  __sanitizer_start_switch_fiber(nullptr, stack, bytes);
}
void announce_arrival(const void** stack_before, size_t* bytes_before) {
  __sanitizer_finish_switch_fiber(nullptr, stack_before, bytes_before);
}
#else
void announce_switch(const void*, size_t) {}
void announce_arrival(const void**, size_t*) {}
#endif

}  // namespace

Grid* grid = nullptr;

Grid::Grid(int blocks, int threads, int shared_bytes, uint64_t seed)
    : blocks(blocks), threads(threads), warps_per_block_(threads / 32), shared_bytes_(shared_bytes),
      random_(seed), fibres_(blocks * threads), warps_(blocks * warps_per_block_),
      arrived_in_block_(blocks, 0) {
  for (int n = 0; n < blocks * threads; ++n) {
    Fibre& fibre = fibres_[n];
    fibre.block = n / threads;
    fibre.thread = n % threads;
    fibre.stack = take_stack();
    warps_[n / 32].lanes[n % 32] = &fibre;
    wake(&fibre);
  }
  for (int n = 0; n < blocks; ++n) {
    shared_.push_back(
        static_cast<unsigned char*>(std::aligned_alloc(128, (shared_bytes + 127) / 128 * 128)));
    std::memset(shared_.back(), 0xff, shared_bytes);  // NaN in every format
  }
}

Grid::~Grid() {
  for (Fibre& fibre : fibres_) free_stacks().push_back(fibre.stack);
  for (unsigned char* bytes : shared_) std::free(bytes);
}

std::string Grid::run(const std::function<void()>& body) {
  body_ = body;
  grid = this;
  if (_setjmp(outside_jump_) == 0) switch_to(next());
  announce_arrival(nullptr, nullptr);
  grid = nullptr;
  return error_;
}

void Grid::enter() {
  const bool is_first = grid->outside_stack_ == nullptr;
  announce_arrival(is_first ? &grid->outside_stack_ : nullptr,
                   is_first ? &grid->outside_bytes_ : nullptr);
  grid->body_();
  grid->leave();
}

void Grid::leave() {
  if (++finished_ == static_cast<int>(fibres_.size())) finish();
  switch_to(next());
}

void Grid::fail(const std::string& what) {
  error_ = what + " (block " + std::to_string(self->block) + ", thread " +
           std::to_string(self->thread) + ")";
  finish();
}

void Grid::finish() {
  announce_switch(outside_stack_, outside_bytes_);
  _longjmp(outside_jump_, 1);
}

void Grid::wake(Fibre* fibre) {
  const int index = fibre->block * warps_per_block_ + fibre->thread / 32;
  if (warps_[index].runnable.empty()) runnable_warps_.push_back(index);
  warps_[index].runnable.push_back(fibre);
}

Fibre* Grid::next() {
  if (runnable_warps_.empty()) fail("some threads wait for ever");
  if (turn_ < 0 || warps_[turn_].runnable.empty())
    turn_ = runnable_warps_[random_() % runnable_warps_.size()];
  auto& lanes = warps_[turn_].runnable;
  std::swap(lanes[random_() % lanes.size()], lanes.back());
  Fibre* const fibre = lanes.back();
  lanes.pop_back();
  if (lanes.empty())
    runnable_warps_.erase(std::find(runnable_warps_.begin(), runnable_warps_.end(), turn_));
  return fibre;
}

void Grid::wait() {
  Fibre* const me = self;
  Fibre* const other = next();
  if (other == me) return;
  if (_setjmp(me->jump) == 0) switch_to(other);
  announce_arrival(nullptr, nullptr);
}

void Grid::switch_to(Fibre* fibre) {
  self = fibre;
  announce_switch(fibre->stack, kStackBytes);
  if (fibre->started) _longjmp(fibre->jump, 1);
  fibre->started = true;
  getcontext(&fibre->context);
  fibre->context.uc_stack.ss_sp = fibre->stack;
  fibre->context.uc_stack.ss_size = kStackBytes;
  fibre->context.uc_link = nullptr;
  makecontext(&fibre->context, &Grid::enter, 0);
  setcontext(&fibre->context);
  std::abort();  // setcontext does not return
}

void Grid::arrive(int& arrived, int expected, int first_fibre) {
  if (++arrived == expected) {
    arrived = 0;
    for (int n = 0; n < expected; ++n) wake(&fibres_[first_fibre + n]);
  }
  wait();
}

void Grid::sync_block() { arrive(arrived_in_block_[self->block], threads, self->block * threads); }

int Grid::arrive_at_grid() {
  const int barrier = grid_barrier_;
  if (++arrived_in_grid_ == blocks * threads) {
    arrived_in_grid_ = 0;
    ++grid_barrier_;
    for (Fibre* fibre : waiting_in_grid_) wake(fibre);
    waiting_in_grid_.clear();
  }
  return barrier;
}

void Grid::await_grid(int barrier) {
  if (grid_barrier_ != barrier) return;
  waiting_in_grid_.push_back(self);
  wait();
}

unsigned char* Grid::shared_memory() { return shared_[self->block]; }

}  // namespace fastqt::host
