// Programmatic dependent launch (PTX ISA: griddepcontrol, sm_90+). Both are no-ops in a grid that was launched
// without the programmatic-stream-serialization attribute, and compile to nothing below sm_90.
#pragma once

namespace flashmla::ptx {

// Blocks until every grid this one depends on has ended and its memory operations are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets dependent grids start their prologue once all CTAs of this grid have called it or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flashmla::ptx
