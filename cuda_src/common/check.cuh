// Device assertions state invariants of the code, never conditions of the input. Compiled in by FLASHMLA_DEVICE_ASSERT.
#pragma once

#if FLASHMLA_DEVICE_ASSERT
#define FLASHMLA_ASSERT(condition)                                                                        \
  do {                                                                                                    \
    if (!(condition)) {                                                                                   \
      printf("%s:%d: block (%d, %d, %d) thread %d: violated: %s\n", __FILE__, __LINE__, blockIdx.x,       \
             blockIdx.y, blockIdx.z, threadIdx.x, #condition);                                            \
      __trap();                                                                                           \
    }                                                                                                     \
  } while (0)
#else
#define FLASHMLA_ASSERT(condition) ((void)0)
#endif
