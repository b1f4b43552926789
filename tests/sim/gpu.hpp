// What a kernel needs of a GPU, on CPU threads: one thread a CUDA thread, the CTAs of a cluster together, clusters one
// after the other. Included before the kernel's own headers, with tests/sim/ptx in place of cuda_src/ptx. It runs the
// logic of a kernel (addresses, layouts, roles, barriers), not its timing: asynchronous operations but cp.async.bulk take effect
// where they are issued, so a missing wait or fence goes unseen, while a barrier that never completes ends the program.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#define __device__
#define __forceinline__ inline

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Dim3 { unsigned x, y, z; };
static thread_local Dim3 threadIdx, blockIdx;
static Dim3 blockDim, gridDim;

namespace sim {

[[noreturn]] inline void die(const char* what) {
  fprintf(stderr, "simulated kernel: %s (block %u %u %u, thread %u)\n", what, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
  abort();
}

constexpr int kSharedBytes = 232448, kMaxThreads = 1024, kNamedBarriers = 16, kMaxCluster = 2, kWaitSeconds = 60;

static std::atomic<int> copies_on_their_way;  // of those that do not land where they are issued

struct Barrier {  // of a fixed number of threads
  pthread_barrier_t barrier;
  void init(unsigned threads) { pthread_barrier_init(&barrier, nullptr, threads); }
  void wait() { pthread_barrier_wait(&barrier); }
};

struct Warp {
  Barrier barrier;
  unsigned long long words[32];
  unsigned registers[32][4];
};

struct MBarrier {
  std::mutex mutex;
  std::condition_variable changed;
  int expected = 0, pending = 0, bytes = 0;
  unsigned phase = 0;
  void settle() {
    if (pending == 0 && bytes == 0) {
      phase ^= 1;
      pending = expected;
      changed.notify_all();
    }
  }
};

struct NamedBarrier {  // of as many threads as those who come say
  std::mutex mutex;
  std::condition_variable changed;
  unsigned threads = 0, arrived = 0, phase = 0;
  void arrive(unsigned expected, bool waits) {
    std::unique_lock<std::mutex> lock(mutex);
    if (arrived > 0 && expected != threads) die("named barrier: another number of threads than the one before said");
    threads = expected;
    const unsigned before = phase;
    if (++arrived == threads) {
      arrived = 0;
      phase++;
      changed.notify_all();
    } else if (waits && !changed.wait_for(lock, std::chrono::seconds(kWaitSeconds), [&] { return phase != before; })) {
      die("waited too long at a named barrier");
    }
  }
};

struct Cta {
  alignas(1024) unsigned char shared[kSharedBytes];
  MBarrier mbarriers[kSharedBytes / 8];
  Barrier all;
  NamedBarrier named[kNamedBarriers];
  Warp warps[kMaxThreads / 32];
  std::atomic<int> vote;
};
static Cta ctas[kMaxCluster];
static Barrier cluster;
static thread_local unsigned rank;  // of the thread's CTA in its cluster

inline Cta& cta() { return ctas[rank]; }
inline int lane() { return threadIdx.x % 32; }
inline Warp& warp() { return cta().warps[threadIdx.x / 32]; }

// Shared memory by address: of the own CTA, or (the rank + 1 in the top byte) of any in the cluster.
inline unsigned char* at(unsigned address) {
  const unsigned owner = address >> 24, offset = address & 0xffffff;
  if (offset >= kSharedBytes) die("shared-memory address");
  return (owner == 0 ? cta() : ctas[owner - 1]).shared + offset;
}
inline MBarrier& mbarrier(unsigned address) {
  const unsigned owner = address >> 24, offset = address & 0xffffff;
  if (offset % 8 || offset >= kSharedBytes) die("mbarrier address");
  return (owner == 0 ? cta() : ctas[owner - 1]).mbarriers[offset / 8];
}

// Everybody's `value`, read by `read(words)`.
template <class Read>
auto among_lanes(unsigned long long value, Read read) {
  Warp& w = warp();
  w.words[lane()] = value;
  w.barrier.wait();
  const auto result = read(w.words);
  w.barrier.wait();
  return result;
}

}  // namespace sim

template <class To, class From>
To bit_cast_32(From from) {
  static_assert(sizeof(To) == 4 && sizeof(From) == 4, "32 bits");
  To to;
  memcpy(&to, &from, 4);
  return to;
}
inline float __int_as_float(int x) { return bit_cast_32<float>(x); }
inline float __uint_as_float(unsigned x) { return bit_cast_32<float>(x); }
inline unsigned __float_as_uint(float x) { return bit_cast_32<unsigned>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
using std::max;
using std::min;

template <class T>
T __ldg(const T* p) { return *p; }
inline void __syncthreads() { sim::cta().all.wait(); }
inline int __syncthreads_and(int predicate) {
  std::atomic<int>& vote = sim::cta().vote;
  __syncthreads();
  if (threadIdx.x == 0) vote = 1;
  __syncthreads();
  if (!predicate) vote = 0;
  __syncthreads();
  return vote;
}
inline void __syncwarp() { sim::warp().barrier.wait(); }

template <class T>
T shuffle(T value, int from) {
  unsigned long long word = 0;
  memcpy(&word, &value, sizeof value);
  word = sim::among_lanes(word, [&](const unsigned long long* words) { return words[from & 31]; });
  memcpy(&value, &word, sizeof value);
  return value;
}
template <class T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  return shuffle(value, (sim::lane() & ~(width - 1)) | (from & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) { return shuffle(value, sim::lane() ^ mask); }
template <class T>
T __shfl_up_sync(unsigned, T value, int delta) { return shuffle(value, sim::lane() < delta ? sim::lane() : sim::lane() - delta); }
inline unsigned __ballot_sync(unsigned, int predicate) {
  return sim::among_lanes(predicate != 0, [](const unsigned long long* words) {
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= (unsigned)words[i] << i;
    return bits;
  });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == ~0u; }
inline int __reduce_max_sync(unsigned, int value) {
  return sim::among_lanes((unsigned)value, [](const unsigned long long* words) {
    int largest = (int)words[0];
    for (int i = 1; i < 32; i++) largest = std::max(largest, (int)words[i]);
    return largest;
  });
}
inline int __reduce_add_sync(unsigned, int value) {
  return sim::among_lanes((unsigned)value, [](const unsigned long long* words) {
    int sum = 0;
    for (int i = 0; i < 32; i++) sum += (int)words[i];
    return sum;
  });
}
inline unsigned long long __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - sim::cta().shared; }
