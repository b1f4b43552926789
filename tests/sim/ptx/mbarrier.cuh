#pragma once
namespace flashmla::ptx {

inline void mbarrier_init(uint32_t bar, uint32_t arrivals) {
  sim::MBarrier& m = sim::mbarrier(bar);
  m.expected = m.pending = arrivals;
  m.bytes = 0;
  m.phase = 0;
}

// `arrivals` arrive, and `bytes` more are expected (or, negative, have landed).
inline void mbarrier_update(uint32_t bar, int arrivals, int bytes) {
  sim::MBarrier& m = sim::mbarrier(bar);
  std::lock_guard<std::mutex> guard(m.mutex);
  if (arrivals > m.pending) sim::die("more arrivals than the barrier counts");
  m.pending -= arrivals;
  m.bytes += bytes;
  m.settle();
}
inline void mbarrier_arrive(uint32_t bar) { mbarrier_update(bar, 1, 0); }
inline void mbarrier_arrive_cluster(uint32_t bar) { mbarrier_update(bar, 1, 0); }
inline void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) { mbarrier_update(bar, 1, bytes); }

inline bool mbarrier_try_wait_parity(uint32_t bar, uint32_t parity) {
  sim::MBarrier& m = sim::mbarrier(bar);
  std::unique_lock<std::mutex> lock(m.mutex);
  const auto passed = [&] { return (m.phase & 1) != (parity & 1); };
  if (!m.changed.wait_for(lock, std::chrono::seconds(sim::kWaitSeconds), passed)) sim::die("a barrier never completes");
  return true;
}

}  // namespace flashmla::ptx
