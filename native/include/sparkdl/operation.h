// What one collective operation is: its kind, buffers and parameters, and what all ranks must agree
// on.
#ifndef SPARKDL_OPERATION_H_
#define SPARKDL_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "sparkdl/dtype.h"
#include "sparkdl/pieces.h"
#include "sparkdl/shm/arena.h"
#include "sparkdl/strided.h"

namespace sparkdl {

// The numbers travel between ranks: append only.
enum class OpKind : uint8_t {
  kAllReduce = 0,
  kReduceScatter = 1,
  kAllGather = 2,
  kBroadcast = 3,
  kBarrier = 4,
  kReduce = 5,
  kGather = 6,
  kScatter = 7,
  kAllToAll = 8,
  kJoin = 9,
};

inline constexpr int kNumOpKinds = 10;

// The numbers travel between ranks: append only.
enum class ReduceOp : uint8_t { kSum = 0, kAvg = 1, kMin = 2, kMax = 3, kProduct = 4 };

inline constexpr int kNumReduceOps = 5;

constexpr bool IsReducing(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce;
}
constexpr bool IsRooted(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}
// Whether the ranks' blocks may differ in size, as `counts` says.
constexpr bool HasBlocks(OpKind kind) {
  return kind == OpKind::kReduceScatter || kind == OpKind::kAllGather || kind == OpKind::kGather ||
         kind == OpKind::kScatter || kind == OpKind::kAllToAll;
}

// One operation as this rank was asked to do it. Sizes are its own; only a rank that has joined
// takes those that the others agree on.
struct Operation {
  OpKind kind = OpKind::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  int32_t root = -1;
  // Elements of the whole buffer for allreduce, reduce and broadcast, of one rank's block for the
  // others, if counts is empty.
  size_t count = 0;
  const std::byte* input = nullptr;  // equals output for the operations in place
  std::byte* output = nullptr;
  // Elements of each rank's block, the same on all ranks; for alltoall of the blocks that this rank
  // sends. Empty: all have `count`.
  std::vector<uint64_t> counts;
  // For alltoall with counts: elements of the blocks that this rank receives.
  std::vector<uint64_t> receive_counts;
  // For several arrays as one operation, instead of input and output: where the results go. count
  // or counts are sums over the arrays. Where ranks have blocks, that of each is what it has in the
  // first array, the second and so on.
  Pieces group;
  // For reduce_scatter and allgather of several arrays: what goes in.
  ConstPieces group_input;
  // For these: elements of each rank's block of the first array, then of the second and so on.
  std::vector<uint64_t> group_counts;
  // For allreduce: where all of its arrays lie, if ranks of this host can reach them there. Not a
  // matter to agree about, but the ranks have to do it the same way.
  std::shared_ptr<const Arena> arena;
  // Multiply what goes in and what comes out of a reduction.
  double prescale = 1.0;
  double postscale = 1.0;
  // What stands for arrays that are not contiguous. They are packed when the operation begins,
  // after those that were queued before it, and unpacked once it has succeeded.
  std::vector<const PackedArray*> packed;
  // What the caller calls it.
  std::string name;
  // Of an operation with a name: the dimensions that its array must have on all ranks, unless it
  // has but one. Where ranks have blocks, all but the first.
  std::vector<uint64_t> shape;

  // Of the whole buffer or of one rank's block; of all blocks where they differ.
  size_t bytes() const {
    const bool is_uneven_exchange = kind == OpKind::kAllToAll && !counts.empty();
    const size_t elements =
        is_uneven_exchange ? std::accumulate(counts.begin(), counts.end(), size_t{0}) : count;
    return elements * BytesOf(dtype);
  }
};

// The arrays of an operation in place.
inline Pieces ArraysOf(const Operation& operation) {
  if (!operation.group.empty()) return operation.group;
  return {{operation.output, operation.bytes()}};
}

// What all ranks must say alike of the operation with one sequence number.
struct Signature {
  uint64_t sequence = 0;
  uint64_t count = 0;
  uint64_t details = 0;  // a hash of everything else in the operation
  OpKind kind = OpKind::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  uint8_t padding = 0;
  int32_t root = -1;

  bool operator==(const Signature&) const = default;
};
static_assert(sizeof(Signature) == 32);

Signature SignatureOf(const Operation& operation, uint64_t sequence);

// 64 bits that tell signatures apart; never 0.
uint64_t DigestOf(const Signature& signature);

std::string_view NameOf(OpKind kind);
std::string_view NameOf(ReduceOp op);

// "allreduce 'weights' of 1024 float32".
std::string Summarize(const Operation& operation);

// As Summarize, with the reduction, the scales, the root, the blocks: what a mismatch is about.
std::string Describe(const Operation& operation);

}  // namespace sparkdl

#endif  // SPARKDL_OPERATION_H_
