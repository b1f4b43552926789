#pragma once
namespace flashmla::ptx {

inline uint32_t cluster_ctarank() { return sim::rank; }
inline uint32_t mapa(uint32_t address, uint32_t rank) { return (address & 0xffffff) | (rank + 1) << 24; }
inline void barrier_cluster_arrive() {}
inline void barrier_cluster_wait() { sim::cluster.wait(); }

}  // namespace flashmla::ptx
