// Operations as tests ask for them.
#ifndef SPARKDL_TESTS_REQUESTS_H_
#define SPARKDL_TESTS_REQUESTS_H_

#include <cstddef>

#include "sparkdl/operation.h"

namespace sparkdl::tests {

inline Operation AllReduceOf(std::byte* data, size_t count, Dtype dtype,
                             ReduceOp op = ReduceOp::kSum) {
  return {OpKind::kAllReduce, dtype, op, -1, count, data, data};
}
inline Operation AllReduceOf(float* data, size_t count, ReduceOp op = ReduceOp::kSum) {
  return AllReduceOf(reinterpret_cast<std::byte*>(data), count, Dtype::kFloat32, op);
}
inline Operation ReduceScatterOf(const std::byte* input, std::byte* output, size_t count,
                                 Dtype dtype, ReduceOp op = ReduceOp::kSum) {
  return {OpKind::kReduceScatter, dtype, op, -1, count, input, output};
}
inline Operation AllGatherOf(const std::byte* input, std::byte* output, size_t count, Dtype dtype) {
  return {OpKind::kAllGather, dtype, ReduceOp::kSum, -1, count, input, output};
}
inline Operation BroadcastOf(std::byte* data, size_t count, Dtype dtype, int root) {
  return {OpKind::kBroadcast, dtype, ReduceOp::kSum, root, count, data, data};
}
inline Operation BarrierRequest() { return {}; }

inline constexpr double kTimeout = 30.0;

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_REQUESTS_H_
