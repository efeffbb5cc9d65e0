// Conversion of operations to calls of NCCL.
#include <utility>

#include "nccl/state.h"
#include "sparkdl/nccl/communicator.h"

namespace sparkdl {

Status NcclCommunicator::Validate(const NcclOperation& operation) const {
  if (operation.rank < 0 || operation.rank >= world_size()) {
    return Status(StatusCode::kInvalidArgument,
                  Describe(operation) + ": rank " + std::to_string(operation.rank) +
                      " is outside a world of " + std::to_string(world_size()) + " ranks");
  }
  if (operation.count == 0) return {};
  for (const void* pointer : {operation.input, static_cast<const void*>(operation.output)}) {
    if (pointer == nullptr) continue;
    const Status status =
        state_->gpu->CheckPointer(pointer, pointer == operation.input ? "the input" : "the output");
    if (!status.ok()) return status.Within(Describe(operation));
  }
  return {};
}

Status NcclCommunicator::Issue(const std::vector<NcclOperation>& operations, CudaStream stream,
                               std::vector<int>& made) {
  const NcclLibrary& library = state_->gpu->library();
  const NcclSymbols& nccl = library.nccl();
  std::vector<int> reductions;
  Status status;
  for (const NcclOperation& operation : operations) {
    int reduction = operation.reduction;
    if (!operation.factor.empty() && status.ok()) {
      std::string factor = operation.factor;
      status =
          library.Check(nccl.ncclRedOpCreatePreMulSum(&reduction, factor.data(), operation.type,
                                                      kNcclScalarHostImmediate, state_->comm),
                        Describe(operation) + ": making the factor");
      if (status.ok()) made.push_back(reduction);
    }
    reductions.push_back(reduction);
  }
  if (status.ok()) status = library.Check(nccl.ncclGroupStart(), "ncclGroupStart");
  if (status.ok()) {
    for (size_t i = 0; i < operations.size() && status.ok(); ++i) {
      status = IssueOne(operations[i], reductions[i], stream);
    }
    // Also after a failure: otherwise this thread's next group would be part of this one.
    const NcclResult ended = nccl.ncclGroupEnd();
    if (status.ok() && ended != NcclResult::kInProgress && ended != NcclResult::kSuccess) {
      status = library.Check(ended, "starting " + Describe(operations.front()));
    }
  }
  return status;
}

Status NcclCommunicator::IssueOne(const NcclOperation& operation, int reduction,
                                  CudaStream stream) {
  const NcclSymbols& nccl = state_->gpu->library().nccl();
  const NcclOperation& o = operation;
  NcclComm comm = state_->comm;
  NcclResult result = NcclResult::kInvalidUsage;
  switch (o.kind) {
    case NcclKind::kAllReduce:
      result = nccl.ncclAllReduce(o.input, o.output, o.count, o.type, reduction, comm, stream);
      break;
    case NcclKind::kReduceScatter:
      result = nccl.ncclReduceScatter(o.input, o.output, o.count, o.type, reduction, comm, stream);
      break;
    case NcclKind::kReduce:
      result = nccl.ncclReduce(o.input, o.output, o.count, o.type, reduction, o.rank, comm, stream);
      break;
    case NcclKind::kAllGather:
      result = nccl.ncclAllGather(o.input, o.output, o.count, o.type, comm, stream);
      break;
    case NcclKind::kBroadcast:
      result = nccl.ncclBroadcast(o.input, o.output, o.count, o.type, o.rank, comm, stream);
      break;
    case NcclKind::kSend:
      result = nccl.ncclSend(o.input, o.count, o.type, o.rank, comm, stream);
      break;
    case NcclKind::kRecv:
      result = nccl.ncclRecv(o.output, o.count, o.type, o.rank, comm, stream);
      break;
  }
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return {};
  return state_->gpu->library().Check(result, Describe(operation));
}

}  // namespace sparkdl
