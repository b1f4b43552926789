// Copies land on a thread of their own, in any order; one in 25 only when nothing else has landed for a while, as one
// may that misses every cache. A copy that is still on its way when its CTA ends is an error.
#pragma once
#include <random>

#include "ptx/mbarrier.cuh"
namespace flashmla::ptx {

class Copier {
 public:
  Copier() { std::thread([this] { run(); }).detach(); }
  void add(uint8_t* dst, const void* src, uint32_t bytes, uint32_t bar) {
    std::lock_guard<std::mutex> guard(mutex);
    sim::copies_on_their_way++;
    copies.push_back({dst, src, bytes, bar, sim::rank, random() % 25 == 0});
    changed.notify_one();
  }

 private:
  struct Copy {
    uint8_t* dst;
    const void* src;
    uint32_t bytes, bar;
    unsigned rank;
    bool late;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Copy> copies;
  std::mt19937 random{1};

  static bool late(const Copy& copy) { return copy.late; }
  void run() {
    for (std::unique_lock<std::mutex> lock(mutex);;) {
      const auto any_in_time = [&] { return !std::all_of(copies.begin(), copies.end(), late); };
      if (!changed.wait_for(lock, std::chrono::milliseconds(400), any_in_time) && copies.empty()) continue;
      const auto end = any_in_time() ? std::partition(copies.begin(), copies.end(), [](auto& c) { return !c.late; }) : copies.end();
      const auto chosen = copies.begin() + random() % (end - copies.begin());
      const Copy copy = *chosen;
      copies.erase(chosen);
      lock.unlock();
      sim::rank = copy.rank;
      memcpy(copy.dst, copy.src, copy.bytes);
      sim::copies_on_their_way--;
      mbarrier_update(copy.bar, 0, -(int)copy.bytes);
      lock.lock();
    }
  }
};
static Copier& copier = *new Copier;

inline void cp_async_bulk(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  if (dst % 16 || (uintptr_t)src % 16 || bytes % 16) sim::die("misaligned bulk copy");
  copier.add(reinterpret_cast<uint8_t*>(sim::at(dst)), src, bytes, bar);
}

}  // namespace flashmla::ptx
