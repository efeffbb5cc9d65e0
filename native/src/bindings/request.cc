#include "bindings/request.h"

#include <cstddef>
#include <string>
#include <utility>

#include "bindings/array_argument.h"
#include "bindings/errors.h"

namespace sparkdl::bindings {
namespace {

[[noreturn]] void RaiseValueError(const std::string& text) {
  RaiseIfError(Status(StatusCode::kInvalidArgument, text));
  throw nb::python_error();
}

ReduceOp ToReduceOp(std::string_view name) {
  for (int i = 0; i < kNumReduceOps; ++i) {
    const auto op = static_cast<ReduceOp>(i);
    if (NameOf(op) == name) return op;
  }
  RaiseValueError("op must be 'sum', 'avg', 'min', 'max' or 'product', got '" + std::string(name) +
                  "'");
}

Request InPlace(OpKind kind, nb::handle object) {
  ArrayArgument array = ToArray("array", object, Access::kWrite);
  Request request;
  request.operation.kind = kind;
  request.operation.dtype = array.dtype;
  request.operation.count = array.count;
  request.operation.input = array.data;
  request.operation.output = array.data;
  request.arguments[0] = std::move(array);
  return request;
}

// reduce_scatter and allgather: one array holds world_size times as many elements as the other.
Request Between(OpKind kind, nb::handle array_object, nb::handle out_object, int world_size) {
  ArrayArgument array = ToArray("array", array_object, Access::kRead);
  ArrayArgument out = ToArray("out", out_object, Access::kWrite);
  if (array.dtype != out.dtype) {
    RaiseIfError(Status(StatusCode::kWrongType, "array is " + std::string(NameOf(array.dtype)) +
                                                    ", out is " + std::string(NameOf(out.dtype)) +
                                                    "; they must be alike"));
  }
  const bool scatters = kind == OpKind::kReduceScatter;
  const size_t block = scatters ? out.count : array.count;
  const size_t whole = scatters ? array.count : out.count;
  if (whole != block * static_cast<size_t>(world_size)) {
    RaiseValueError(std::string(scatters ? "array" : "out") +
                    " must hold world_size = " + std::to_string(world_size) +
                    " times the elements of " + (scatters ? "out" : "array") + ": " +
                    std::to_string(block * static_cast<size_t>(world_size)) + ", got " +
                    std::to_string(whole));
  }
  Request request;
  request.operation.kind = kind;
  request.operation.dtype = array.dtype;
  request.operation.count = block;
  request.operation.input = array.data;
  request.operation.output = out.data;
  request.arguments[0] = std::move(array);
  request.arguments[1] = std::move(out);
  return request;
}

}  // namespace

Request AllReduceRequest(nb::handle object, std::string_view op) {
  Request request = InPlace(OpKind::kAllReduce, object);
  request.operation.reduce_op = ToReduceOp(op);
  return request;
}

Request BroadcastRequest(nb::handle object, int root) {
  Request request = InPlace(OpKind::kBroadcast, object);
  request.operation.root = root;
  return request;
}

Request ReduceScatterRequest(nb::handle array, nb::handle out, std::string_view op,
                             int world_size) {
  Request request = Between(OpKind::kReduceScatter, array, out, world_size);
  request.operation.reduce_op = ToReduceOp(op);
  return request;
}

Request AllGatherRequest(nb::handle array, nb::handle out, int world_size) {
  return Between(OpKind::kAllGather, array, out, world_size);
}

}  // namespace sparkdl::bindings
