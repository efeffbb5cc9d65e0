// An NCCL operation as requested on this rank.
#ifndef SPARKDL_NCCL_OPERATION_H_
#define SPARKDL_NCCL_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "sparkdl/nccl/symbols.h"
#include "sparkdl/status.h"

namespace sparkdl {

enum class NcclKind : uint8_t {
  kAllReduce,
  kReduceScatter,
  kReduce,
  kAllGather,
  kBroadcast,
  kSend,
  kRecv,
};

struct NcclOperation {
  NcclKind kind = NcclKind::kAllReduce;
  // Buffers in memory of the communicator's GPU; null if the kind of operation does not have the
  // buffer.
  const void* input = nullptr;
  void* output = nullptr;
  // Number of elements of the whole buffer; for reduce_scatter and allgather, of one rank's block.
  size_t count = 0;
  // NCCL's values; see NcclTypeOf and NcclReductionOf.
  int type = 0;
  int reduction = 0;
  // Root of the operation, or peer of a send or recv.
  int rank = 0;
  // If not empty: one element, as bytes; a sum multiplies every rank's input by it.
  std::string factor;
};

struct NcclType {
  std::string_view name;
  int number;
  size_t bytes;
};

// NCCL's type with NumPy's name, such as "float32" or "bfloat16". For an unknown name the status
// lists the known ones.
Result<NcclType> NcclTypeOf(std::string_view name);

// NCCL's value for "sum", "avg", "min", "max" or "product".
Result<int> NcclReductionOf(std::string_view name);

// Such as "allreduce of 1024 float32" or "send of 3 uint8 to rank 2".
std::string Describe(const NcclOperation& operation);

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_OPERATION_H_
