// setmaxnreg: moves registers between warpgroups. Needs sm_90a and a register cap at entry (__launch_bounds__).
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

template <uint32_t kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashmla::ptx
