#pragma once
namespace flashmla::ptx {

inline int opaque(int x) { return x; }

}  // namespace flashmla::ptx
