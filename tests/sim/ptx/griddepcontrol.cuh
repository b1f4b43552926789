#pragma once
namespace flashmla::ptx {

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace flashmla::ptx
