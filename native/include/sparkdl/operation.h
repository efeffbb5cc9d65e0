// What one collective operation is: its kind, buffers and parameters, and what all ranks must agree
// on.
#ifndef SPARKDL_OPERATION_H_
#define SPARKDL_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "sparkdl/dtype.h"

namespace sparkdl {

// The numbers travel between ranks: append only.
enum class OpKind : uint8_t {
  kAllReduce = 0,
  kReduceScatter = 1,
  kAllGather = 2,
  kBroadcast = 3,
  kBarrier = 4,
};

// The numbers travel between ranks: append only.
enum class ReduceOp : uint8_t { kSum = 0, kAvg = 1, kMin = 2, kMax = 3, kProduct = 4 };

inline constexpr int kNumReduceOps = 5;

// One operation as this rank was asked to do it. Sizes are its own; nothing here comes from a peer.
struct Operation {
  OpKind kind = OpKind::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  int32_t root = -1;
  // Elements of the whole buffer for allreduce and broadcast, of one rank's block for
  // reduce_scatter (the output) and allgather (the input).
  size_t count = 0;
  const std::byte* input = nullptr;  // equals output for the operations in place
  std::byte* output = nullptr;

  size_t bytes() const { return count * BytesOf(dtype); }
};

// What all ranks must say alike of the operation with one sequence number. Also the wire format.
struct Signature {
  uint64_t sequence = 0;
  uint64_t count = 0;
  OpKind kind = OpKind::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  uint8_t padding = 0;
  int32_t root = -1;

  bool operator==(const Signature&) const = default;
};
static_assert(sizeof(Signature) == 24);

Signature SignatureOf(const Operation& operation, uint64_t sequence);

std::string_view NameOf(OpKind kind);
std::string_view NameOf(ReduceOp op);

// "allreduce of 1024 float32". Safe on bytes that a peer wrote.
std::string Describe(const Signature& signature);

// As Describe, with the reduce operation or the root: what a mismatch is about.
std::string DescribeFully(const Signature& signature);

}  // namespace sparkdl

#endif  // SPARKDL_OPERATION_H_
