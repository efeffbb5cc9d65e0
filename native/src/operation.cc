#include "sparkdl/operation.h"

namespace sparkdl {

std::string_view NameOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return "float32";
    case Dtype::kFloat64:
      return "float64";
    case Dtype::kBfloat16:
      return "bfloat16";
    case Dtype::kFloat16:
      return "float16";
    case Dtype::kInt32:
      return "int32";
    case Dtype::kInt64:
      return "int64";
    case Dtype::kUint8:
      return "uint8";
    case Dtype::kInt8:
      return "int8";
    case Dtype::kInt16:
      return "int16";
    case Dtype::kUint16:
      return "uint16";
    case Dtype::kUint32:
      return "uint32";
    case Dtype::kUint64:
      return "uint64";
    case Dtype::kBool:
      return "bool";
  }
  return "an unknown dtype";
}

std::string_view NameOf(OpKind kind) {
  switch (kind) {
    case OpKind::kAllReduce:
      return "allreduce";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllGather:
      return "allgather";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kBarrier:
      return "barrier";
  }
  return "an unknown operation";
}

std::string_view NameOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
  }
  return "an unknown reduction";
}

Signature SignatureOf(const Operation& operation, uint64_t sequence) {
  return Signature{.sequence = sequence,
                   .count = operation.count,
                   .kind = operation.kind,
                   .dtype = operation.dtype,
                   .reduce_op = operation.reduce_op,
                   .root = operation.root};
}

std::string Describe(const Signature& signature) {
  std::string text(NameOf(signature.kind));
  if (signature.kind == OpKind::kBarrier) return text;
  return text + " of " + std::to_string(signature.count) + " " +
         std::string(NameOf(signature.dtype));
}

std::string DescribeFully(const Signature& signature) {
  std::string text = Describe(signature);
  if (signature.kind == OpKind::kBroadcast) text += " from rank " + std::to_string(signature.root);
  if (signature.kind == OpKind::kAllReduce || signature.kind == OpKind::kReduceScatter) {
    text += " by " + std::string(NameOf(signature.reduce_op));
  }
  return text;
}

}  // namespace sparkdl
