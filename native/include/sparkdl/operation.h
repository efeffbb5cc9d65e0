// Description of one collective operation: its kind, buffers and parameters, and the properties on
// which all ranks must agree.
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

// The values are sent to other ranks: append only.
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

// The values are sent to other ranks: append only.
enum class ReduceOp : uint8_t { kSum = 0, kAvg = 1, kMin = 2, kMax = 3, kProduct = 4 };

inline constexpr int kNumReduceOps = 5;

constexpr bool IsReducing(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce;
}
constexpr bool IsRooted(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}
// Whether each rank has a block; the sizes of the blocks may differ, see Operation::counts.
constexpr bool HasBlocks(OpKind kind) {
  return kind == OpKind::kReduceScatter || kind == OpKind::kAllGather || kind == OpKind::kGather ||
         kind == OpKind::kScatter || kind == OpKind::kAllToAll;
}

// One operation as requested on this rank. The sizes are those that this rank passed; only a rank
// that has joined uses the sizes on which the other ranks agree.
struct Operation {
  OpKind kind = OpKind::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  int32_t root = -1;
  // Number of elements: of the whole buffer for allreduce, reduce and broadcast; of one rank's
  // block for the other operations, if counts is empty.
  size_t count = 0;
  const std::byte* input = nullptr;  // equals output for in-place operations
  std::byte* output = nullptr;
  // Number of elements of each rank's block, the same on all ranks; for alltoall, of the blocks
  // that this rank sends. Empty if all blocks have `count` elements.
  std::vector<uint64_t> counts;
  // For alltoall with counts: number of elements of each block that this rank receives.
  std::vector<uint64_t> receive_counts;
  // For a group, that is, several arrays in one operation: destinations of the results, instead of
  // input and output. count or counts are then sums over the arrays. If ranks have blocks, the
  // block of a rank consists of its block of the first array, of the second and so on.
  Pieces group;
  // For reduce_scatter and allgather of a group: input arrays.
  ConstPieces group_input;
  // For reduce_scatter and allgather of a group: number of elements of each rank's block of the
  // first array, then of the second and so on.
  std::vector<uint64_t> group_counts;
  // For allreduce: arena in which all of its arrays lie, if the ranks of this host can access them
  // there. Ranks with different arenas or offsets still agree on the operation, which then does not
  // use the arena.
  std::shared_ptr<const Arena> arena;
  // Factors applied to the input and the output of a reduction.
  double prescale = 1.0;
  double postscale = 1.0;
  // Packed copies of arrays that are not contiguous. The arrays are packed when the operation
  // begins, after those that were queued before it, and unpacked once it has succeeded.
  std::vector<const PackedArray*> packed;
  // The caller's name of the operation.
  std::string name;
  // For an operation with a name: dimensions of its array, which must be equal on all ranks;
  // without the first dimension if ranks have blocks. Empty if the array has fewer than two
  // dimensions.
  std::vector<uint64_t> shape;

  // Size of the whole buffer or of one rank's block; if the blocks differ, of all blocks.
  size_t bytes() const {
    const bool is_uneven_exchange = kind == OpKind::kAllToAll && !counts.empty();
    const size_t elements =
        is_uneven_exchange ? std::accumulate(counts.begin(), counts.end(), size_t{0}) : count;
    return elements * BytesOf(dtype);
  }
};

// The arrays of an in-place operation.
inline Pieces ArraysOf(const Operation& operation) {
  if (!operation.group.empty()) return operation.group;
  return {{operation.output, operation.bytes()}};
}

// Properties of the operation with one sequence number on which all ranks must agree.
struct Signature {
  uint64_t sequence = 0;
  uint64_t count = 0;
  uint64_t details = 0;  // hash of all other properties
  OpKind kind = OpKind::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp reduce_op = ReduceOp::kSum;
  uint8_t padding = 0;
  int32_t root = -1;

  bool operator==(const Signature&) const = default;
};
static_assert(sizeof(Signature) == 32);

Signature SignatureOf(const Operation& operation, uint64_t sequence);

// 64-bit hash of a signature; never 0.
uint64_t DigestOf(const Signature& signature);

std::string_view NameOf(OpKind kind);
std::string_view NameOf(ReduceOp op);

// Such as "allreduce 'weights' of 1024 float32".
std::string Summarize(const Operation& operation);

// Summarize() with the reduction, scales, root and blocks, for messages about mismatches.
std::string Describe(const Operation& operation);

}  // namespace sparkdl

#endif  // SPARKDL_OPERATION_H_
