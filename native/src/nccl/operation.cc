#include "sparkdl/nccl/operation.h"

#include <array>

namespace sparkdl {
namespace {

constexpr std::array kTypes = {NcclType{"int8", 0, 1},    NcclType{"uint8", 1, 1},
                               NcclType{"int32", 2, 4},   NcclType{"uint32", 3, 4},
                               NcclType{"int64", 4, 8},   NcclType{"uint64", 5, 8},
                               NcclType{"float16", 6, 2}, NcclType{"float32", 7, 4},
                               NcclType{"float64", 8, 8}, NcclType{"bfloat16", 9, 2}};

constexpr std::array<std::string_view, 5> kReductions = {"sum", "product", "max", "min", "avg"};

std::string_view NameOf(NcclKind kind) {
  switch (kind) {
    case NcclKind::kAllReduce:
      return "allreduce";
    case NcclKind::kReduceScatter:
      return "reduce_scatter";
    case NcclKind::kReduce:
      return "reduce";
    case NcclKind::kAllGather:
      return "allgather";
    case NcclKind::kBroadcast:
      return "broadcast";
    case NcclKind::kSend:
      return "send";
    case NcclKind::kRecv:
      return "recv";
  }
  return "an unknown operation";
}

}  // namespace

Result<NcclType> NcclTypeOf(std::string_view name) {
  for (const NcclType& type : kTypes) {
    if (type.name == name) return type;
  }
  std::string known;
  for (const NcclType& type : kTypes) {
    known += (known.empty() ? "" : ", ") + std::string(type.name);
  }
  return Status(StatusCode::kInvalidArgument,
                "NCCL has no " + std::string(name) + "; it takes " + known);
}

Result<int> NcclReductionOf(std::string_view name) {
  for (size_t i = 0; i < kReductions.size(); ++i) {
    if (kReductions[i] == name) return static_cast<int>(i);
  }
  return Status(
      StatusCode::kInvalidArgument,
      "op must be 'sum', 'avg', 'min', 'max' or 'product', got '" + std::string(name) + "'");
}

std::string Describe(const NcclOperation& operation) {
  std::string_view type = "elements of an unknown type";
  for (const NcclType& known : kTypes) {
    if (known.number == operation.type) type = known.name;
  }
  std::string text(NameOf(operation.kind));
  text += " of " + std::to_string(operation.count) + " " + std::string(type);
  if (operation.kind == NcclKind::kSend) text += " to rank " + std::to_string(operation.rank);
  if (operation.kind == NcclKind::kRecv) text += " from rank " + std::to_string(operation.rank);
  return text;
}

}  // namespace sparkdl
