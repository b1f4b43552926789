#pragma once
namespace flashmla::ptx {

inline bool elect_sync() { return sim::lane() == 0; }

}  // namespace flashmla::ptx
