// Operations as tests request them.
#ifndef SPARKDL_TESTS_REQUESTS_H_
#define SPARKDL_TESTS_REQUESTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparkdl/operation.h"

namespace sparkdl::tests {

inline constexpr double kTimeout = 30.0;

// Number of elements of each rank's block.
using Counts = std::vector<uint64_t>;

// Counts that differ from rank to rank; some are zero.
inline Counts UnevenCounts(int world_size, size_t largest) {
  Counts counts;
  for (size_t rank = 0; rank < static_cast<size_t>(world_size); ++rank) {
    counts.push_back(largest * ((rank + 2) % 3) / 2);
  }
  return counts;
}

// An operation on one buffer of `count` elements.
inline Operation InPlace(OpKind kind, std::byte* data, size_t count, Dtype dtype) {
  Operation operation;
  operation.kind = kind;
  operation.dtype = dtype;
  operation.count = count;
  operation.input = data;
  operation.output = data;
  return operation;
}

// An operation from one buffer to another, of blocks of `count` elements.
inline Operation Between(OpKind kind, const std::byte* input, std::byte* output, size_t count,
                         Dtype dtype) {
  Operation operation = InPlace(kind, output, count, dtype);
  operation.input = input;
  return operation;
}

inline Operation Rooted(Operation operation, int root) {
  operation.root = root;
  return operation;
}
inline Operation By(Operation operation, ReduceOp op) {
  operation.reduce_op = op;
  return operation;
}

inline Operation AllReduceOf(std::byte* data, size_t count, Dtype dtype,
                             ReduceOp op = ReduceOp::kSum) {
  return By(InPlace(OpKind::kAllReduce, data, count, dtype), op);
}
inline Operation AllReduceOf(float* data, size_t count, ReduceOp op = ReduceOp::kSum) {
  return AllReduceOf(reinterpret_cast<std::byte*>(data), count, Dtype::kFloat32, op);
}
inline Operation BroadcastOf(std::byte* data, size_t count, Dtype dtype, int root) {
  return Rooted(InPlace(OpKind::kBroadcast, data, count, dtype), root);
}
inline Operation BarrierRequest() { return {}; }

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_REQUESTS_H_
