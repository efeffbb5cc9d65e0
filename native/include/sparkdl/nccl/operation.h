// One operation of NCCL as this rank was asked to do it.
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
  // In memory of the communicator's GPU; null where the kind has none.
  const void* input = nullptr;
  void* output = nullptr;
  // Elements of the whole buffer; of one rank's block for reduce_scatter and allgather.
  size_t count = 0;
  // NCCL's numbers, by NcclTypeOf and NcclReductionOf.
  int type = 0;
  int reduction = 0;
  // The root, or the other rank of a send or recv.
  int rank = 0;
  // Where not empty: one element that a sum multiplies every rank's input by.
  std::string factor;
};

struct NcclType {
  std::string_view name;
  int number;
  size_t bytes;
};

// By NumPy's names: "float32", "bfloat16", ...; an error that lists what there is.
Result<NcclType> NcclTypeOf(std::string_view name);

// "sum", "avg", "min", "max", "product".
Result<int> NcclReductionOf(std::string_view name);

// "allreduce of 1024 float32", "send of 3 uint8 to rank 2".
std::string Describe(const NcclOperation& operation);

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_OPERATION_H_
