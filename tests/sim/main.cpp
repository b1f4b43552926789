// One kernel variant as a shared library: simulator.py writes unit.hpp (includes and the Config of the variant).
#include "gpu.hpp"
#include "unit.hpp"

extern "C" int threads() { return Config::kThreads; }

extern "C" void launch(const Params* params, unsigned grid_x, unsigned grid_y, unsigned grid_z) {
  gridDim = {grid_x, grid_y, grid_z};
  blockDim = {Config::kThreads, 1, 1};
  for (unsigned z = 0; z < grid_z; z++)
    for (unsigned y = 0; y < grid_y; y++)
      for (unsigned x = 0; x < grid_x; x++) {
        memset(sim::shared, 0x7f, sizeof sim::shared);  // NaN in every format
        sim::cta.init(Config::kThreads);
        for (auto& barrier : sim::named) barrier.init(128);
        for (auto& warp : sim::warps) warp.barrier.init(32);
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < Config::kThreads; t++)
          threads.emplace_back([=] {
            blockIdx = {x, y, z};
            threadIdx = {t, 0, 0};
            run(*params);
          });
        for (auto& thread : threads) thread.join();
      }
}
