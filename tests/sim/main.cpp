// One kernel variant as a shared library: simulator.py writes unit.hpp (includes and the Config of the variant).
#include "gpu.hpp"
#include "unit.hpp"

extern "C" int threads() { return Config::kThreads; }

extern "C" void launch(const Params* params, unsigned grid_x, unsigned grid_y, unsigned grid_z) {
  constexpr unsigned kCluster = Config::kClusterX, kThreads = Config::kThreads;
  static_assert(kCluster <= sim::kMaxCluster, "more CTAs of a cluster than the simulator has");
  if (grid_x % kCluster) sim::die("the grid is no multiple of the cluster");
  gridDim = {grid_x, grid_y, grid_z};
  blockDim = {kThreads, 1, 1};
  for (unsigned z = 0; z < grid_z; z++)
    for (unsigned y = 0; y < grid_y; y++)
      for (unsigned x = 0; x < grid_x; x += kCluster) {
        sim::cluster.init(kCluster * kThreads);
        std::vector<std::thread> threads;
        for (unsigned rank = 0; rank < kCluster; rank++) {
          sim::Cta& cta = sim::ctas[rank];
          memset(cta.shared, 0x7f, sizeof cta.shared);  // NaN in every format
          cta.all.init(kThreads);
          for (auto& warp : cta.warps) warp.barrier.init(32);
        }
        for (unsigned t = 0; t < kCluster * kThreads; t++)
          threads.emplace_back([=] {
            sim::rank = t / kThreads;
            blockIdx = {x + sim::rank, y, z};
            threadIdx = {t % kThreads, 0, 0};
            run(*params);
          });
        for (auto& thread : threads) thread.join();
        if (sim::copies_on_their_way) sim::die("a CTA ends while copies are on their way");
        for (auto& cta : sim::ctas)
          for (auto& barrier : cta.named)
            if (barrier.arrived) sim::die("a CTA ends while a named barrier is not complete");
      }
}
