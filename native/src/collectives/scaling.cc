// Factors and divisors of the reductions of Collectives.
#include "sparkdl/collectives/collectives.h"
#include "sparkdl/copy.h"

namespace sparkdl {

Reduction Collectives::ReductionOf(const Operation& operation) const {
  const bool travels_packed =
      operation.dtype == Dtype::kFloat32 &&
      (operation.reduce_op == ReduceOp::kSum || operation.reduce_op == ReduceOp::kAvg);
  return {.kernels = *FindReduceKernels(operation.dtype, operation.reduce_op),
          .finish = {.divisor = static_cast<uint64_t>(topology_.world_size()),
                     .factor = operation.postscale},
          .wire = travels_packed ? wire_ : nullptr};
}

Status Collectives::Prescale(const Operation& operation, Operation& scaled, OperationGuard& guard) {
  // Nothing may be written before it is certain that the ranks agree.
  SPARKDL_RETURN_IF_ERROR(inside_.board().SyncIfNotYet(guard));
  const ReduceKernels& kernels = ReductionOf(operation).kernels;
  scaled = operation;
  if (operation.kind == OpKind::kAllReduce) {
    for (const Piece& piece : ArraysOf(operation)) {
      kernels.scale(piece.data, piece.data, piece.bytes / kernels.element_bytes,
                    operation.prescale);
    }
    return {};
  }
  // The other kinds of reductions must leave their input unchanged.
  const size_t bytes =
      operation.kind == OpKind::kReduceScatter ? BlocksOf(operation).total() : operation.bytes();
  if (scaled_.size() < bytes) scaled_ = std::vector<std::byte>(bytes);
  const auto scale = [&](std::byte* to, const ConstPiece& from) {
    kernels.scale(to, from.data, from.bytes / kernels.element_bytes, operation.prescale);
  };
  if (!operation.group.empty()) {
    std::byte* next = scaled_.data();
    for (ConstPiece& array : scaled.group_input) {
      scale(next, array);
      array.data = next;
      next += array.bytes;
    }
    return {};
  }
  scale(scaled_.data(), {operation.input, bytes});
  if (operation.kind == OpKind::kReduce && operation.root == topology_.rank()) {
    CopyBytes(operation.output, scaled_.data(), bytes);
    return {};
  }
  scaled.input = scaled_.data();
  if (operation.kind == OpKind::kReduce) scaled.output = scaled_.data();
  return {};
}

}  // namespace sparkdl
