#include "sparkdl/operation.h"

#include <bit>
#include <cstdio>

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
    case OpKind::kReduce:
      return "reduce";
    case OpKind::kGather:
      return "gather";
    case OpKind::kScatter:
      return "scatter";
    case OpKind::kAllToAll:
      return "alltoall";
    case OpKind::kJoin:
      return "join";
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

namespace {

// The finalizer of MurmurHash3 (Austin Appleby, public domain), chained.
uint64_t Mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0xff51afd7ed558ccdU;
  hash = (hash ^ (hash >> 33)) * 0xc4ceb9fe1a85ec53U;
  return hash ^ (hash >> 33);
}

uint64_t DetailsOf(const Operation& operation) {
  uint64_t hash = 0;
  if (!operation.name.empty()) {
    for (const char c : operation.name) hash = Mix(hash, static_cast<unsigned char>(c));
    hash = Mix(hash, 1);
  }
  if (operation.prescale != 1.0 || operation.postscale != 1.0) {
    hash = Mix(hash, std::bit_cast<uint64_t>(operation.prescale));
    hash = Mix(hash, std::bit_cast<uint64_t>(operation.postscale));
    hash = Mix(hash, 2);
  }
  if (!operation.group.empty()) {
    hash = Mix(hash, operation.group.size());  // mixing a zero into zero has no effect
    if (operation.group_counts.empty()) {
      for (const Piece& piece : operation.group) hash = Mix(hash, piece.bytes);
    } else {
      for (const uint64_t count : operation.group_counts) hash = Mix(hash, count);
    }
    hash = Mix(hash, 3);
  }
  if (operation.arena != nullptr) {
    hash = Mix(hash, static_cast<uint64_t>(operation.arena->number()));
    for (const Piece& piece : ArraysOf(operation)) {
      hash = Mix(hash, operation.arena->OffsetOf(piece.data));
    }
    hash = Mix(hash, 5);
  }
  if (!operation.counts.empty()) {
    // In an alltoall, the counts may differ from rank to rank.
    if (operation.kind != OpKind::kAllToAll) {
      for (const uint64_t count : operation.counts) hash = Mix(hash, count);
    }
    hash = Mix(hash, 4);
  }
  if (!operation.shape.empty()) {
    hash = Mix(hash, operation.shape.size());
    for (const uint64_t dimension : operation.shape) hash = Mix(hash, dimension);
    hash = Mix(hash, 6);
  }
  return hash;
}

std::string JoinNumbers(const std::vector<uint64_t>& numbers) {
  std::string text;
  for (const uint64_t number : numbers) {
    if (!text.empty()) text += ", ";
    text += std::to_string(number);
  }
  return text;
}

// Such as "in arrays of 3, 4" or, if ranks have blocks, "in arrays of blocks (1, 2), (2, 2)".
std::string DescribeGroup(const Operation& operation) {
  if (operation.group_counts.empty()) {
    std::vector<uint64_t> counts;
    for (const Piece& piece : operation.group) {
      counts.push_back(piece.bytes / BytesOf(operation.dtype));
    }
    return "in arrays of " + JoinNumbers(counts);
  }
  const auto num_ranks =
      static_cast<std::ptrdiff_t>(operation.group_counts.size() / operation.group.size());
  std::string text;
  for (auto next = operation.group_counts.begin(); next != operation.group_counts.end();) {
    text += text.empty() ? "in arrays of blocks (" : ", (";
    text += JoinNumbers({next, next + num_ranks}) + ")";
    next += num_ranks;
  }
  return text;
}

std::string FormatNumber(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", number);
  return text;
}

}  // namespace

Signature SignatureOf(const Operation& operation, uint64_t sequence) {
  return Signature{.sequence = sequence,
                   .count = operation.count,
                   .details = DetailsOf(operation),
                   .kind = operation.kind,
                   .dtype = operation.dtype,
                   .reduce_op = operation.reduce_op,
                   .root = operation.root};
}

uint64_t DigestOf(const Signature& signature) {
  const uint64_t kinds = static_cast<uint64_t>(signature.kind) |
                         static_cast<uint64_t>(signature.dtype) << 8 |
                         static_cast<uint64_t>(signature.reduce_op) << 16 |
                         static_cast<uint64_t>(static_cast<uint32_t>(signature.root)) << 32;
  uint64_t hash = Mix(signature.sequence, signature.count);
  hash = Mix(hash, signature.details);
  return Mix(hash, kinds) | 1;
}

std::string Summarize(const Operation& operation) {
  std::string text(NameOf(operation.kind));
  if (!operation.name.empty()) text += " '" + operation.name + "'";
  if (operation.kind == OpKind::kBarrier || operation.kind == OpKind::kJoin) return text;
  text += " of ";
  if (operation.counts.empty()) text += std::to_string(operation.count) + " ";
  return text + std::string(NameOf(operation.dtype));
}

std::string Describe(const Operation& operation) {
  std::string text = Summarize(operation);
  if (operation.kind == OpKind::kBarrier || operation.kind == OpKind::kJoin) return text;
  if (!operation.counts.empty() && operation.group.empty()) {
    text += " in blocks of " + JoinNumbers(operation.counts);
  }
  if (!operation.receive_counts.empty()) {
    text += " for blocks of " + JoinNumbers(operation.receive_counts);
  }
  if (!operation.group.empty()) text += " " + DescribeGroup(operation);
  if (!operation.shape.empty()) {
    text += HasBlocks(operation.kind) ? " in rows of " : " of shape ";
    text.append("(").append(JoinNumbers(operation.shape)).append(")");
  }
  if (IsReducing(operation.kind)) text += " by " + std::string(NameOf(operation.reduce_op));
  if (operation.prescale != 1.0) text += ", prescale " + FormatNumber(operation.prescale);
  if (operation.postscale != 1.0) text += ", postscale " + FormatNumber(operation.postscale);
  if (IsRooted(operation.kind)) {
    const bool leaves_root =
        operation.kind == OpKind::kBroadcast || operation.kind == OpKind::kScatter;
    text += (leaves_root ? " from rank " : " to rank ") + std::to_string(operation.root);
  }
  return text;
}

}  // namespace sparkdl
