// Fixed-width integers and 16-bit float storage, without any toolkit header (NVRTC has none by default).
#pragma once

namespace flashmla {

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

static_assert(sizeof(int32_t) == 4 && sizeof(int64_t) == 8, "unexpected integer widths");

// Storage only; arithmetic goes through packed conversion instructions in ptx/math.cuh.
struct bf16_t { uint16_t bits; };
struct fp16_t { uint16_t bits; };

// A CUtensorMap as the driver encodes it. The copy engine needs it 64-byte aligned in constant or parameter space.
struct alignas(64) TensorMap { uint8_t bytes[128]; };

}  // namespace flashmla
