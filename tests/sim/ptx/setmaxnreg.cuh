#pragma once
namespace flashmla::ptx {

template <uint32_t kRegisters>
inline void setmaxnreg_inc() {}
template <uint32_t kRegisters>
inline void setmaxnreg_dec() {}

}  // namespace flashmla::ptx
