#pragma once
namespace flashmla::ptx {

inline void fence_proxy_async() {}
inline void fence_mbarrier_init() {}

}  // namespace flashmla::ptx
