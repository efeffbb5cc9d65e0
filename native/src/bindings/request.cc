#include "bindings/request.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "bindings/array_argument.h"
#include "bindings/errors.h"

namespace sparkdl::bindings {
namespace {

ReduceOp ToReduceOp(std::string_view name) {
  for (int i = 0; i < kNumReduceOps; ++i) {
    const auto op = static_cast<ReduceOp>(i);
    if (NameOf(op) == name) return op;
  }
  RaiseInvalid("op must be 'sum', 'avg', 'min', 'max' or 'product', got '" + std::string(name) +
               "'");
}

void SetReduction(Request& request, const ReductionArguments& reduction) {
  request.operation.reduce_op = ToReduceOp(reduction.op);
  request.operation.prescale = reduction.prescale;
  request.operation.postscale = reduction.postscale;
}

void Add(Request& request, ArrayArgument argument) {
  if (argument.packed != nullptr) request.operation.packed.push_back(argument.packed.get());
  request.arguments.push_back(std::move(argument));
}

Request InPlace(OpKind kind, nb::handle object, Access access) {
  ArrayArgument array = ToArray("array", object, access);
  Request request;
  request.operation.kind = kind;
  request.operation.dtype = array.dtype;
  request.operation.count = array.count;
  request.operation.input = array.data;
  request.operation.output = array.data;
  Add(request, std::move(array));
  return request;
}

// An array of one block, or of the blocks of all ranks, and its name in messages.
struct Sized {
  const char* name;
  const ArrayArgument* array;
};

// The caller's names of the arrays of an operation, and of the sizes of their blocks.
struct Names {
  std::string array = "array";
  std::string out = "out";
  std::string counts = "counts";
};

void CheckDtypes(const ArrayArgument& array, const ArrayArgument& out, const Names& names) {
  if (array.dtype == out.dtype) return;
  RaiseInvalid(names.array + " is " + std::string(NameOf(array.dtype)) + ", " + names.out + " is " +
               std::string(NameOf(out.dtype)) + "; they must be alike");
}

// Sum of the counts; UINT64_MAX, which is not the size of any array, if the sum overflows.
uint64_t Total(const std::vector<uint64_t>& counts) {
  uint64_t total = 0;
  for (const uint64_t count : counts) {
    if (__builtin_add_overflow(total, count, &total)) return UINT64_MAX;
  }
  return total;
}

std::vector<uint64_t> ReadCounts(const std::string& name, const std::vector<int64_t>& counts,
                                 int world_size) {
  if (counts.size() != static_cast<size_t>(world_size)) {
    RaiseInvalid(name + " must have world_size = " + std::to_string(world_size) + " entries, got " +
                 std::to_string(counts.size()));
  }
  const auto least = std::ranges::min(counts);
  if (least < 0) RaiseInvalid(name + " has " + std::to_string(least) + " elements");
  return {counts.begin(), counts.end()};
}

void CheckSize(const Sized& sized, uint64_t expected, const std::string& why) {
  if (sized.array == nullptr || sized.array->count == expected) return;
  RaiseInvalid(std::string(sized.name) + " must hold " + why + ": " + std::to_string(expected) +
               ", got " + std::to_string(sized.array->count));
}

// Sets the sizes of an operation on a block of this rank and the blocks of all ranks. One of the
// two arrays may be missing on this rank.
void SetBlocks(Operation& operation, const Sized& block, const Sized& whole, const Counts& given,
               int rank, int world_size, const std::string& counts_name = "counts") {
  const auto num_ranks = static_cast<uint64_t>(world_size);
  if (given.has_value()) {
    std::vector<uint64_t> counts = ReadCounts(counts_name, *given, world_size);
    CheckSize(block, counts[static_cast<size_t>(rank)],
              counts_name + "[" + std::to_string(rank) + "] elements");
    CheckSize(whole, Total(counts), "the sum of " + counts_name);
    // Equal blocks are the same operation, whether or not counts were given.
    if (std::ranges::count(counts, counts.front()) == world_size) {
      operation.count = counts.front();
    } else {
      operation.count = Total(counts);
      operation.counts = std::move(counts);
    }
    return;
  }
  if (block.array == nullptr) {
    if (whole.array->count % num_ranks != 0) {
      RaiseInvalid(std::string(whole.name) + " has " + std::to_string(whole.array->count) +
                   " elements, which are not " + std::to_string(world_size) + " equal blocks");
    }
    operation.count = whole.array->count / num_ranks;
    return;
  }
  CheckSize(whole, block.array->count * num_ranks,
            "world_size = " + std::to_string(world_size) + " times the elements of " + block.name);
  operation.count = block.array->count;
}

// A request with one input array and one output array.
Request Between(OpKind kind, nb::handle array_object, nb::handle out_object,
                const Names& names = {}) {
  ArrayArgument array = ToArray(names.array.c_str(), array_object, Access::kRead);
  ArrayArgument out = ToArray(names.out.c_str(), out_object, Access::kWrite);
  CheckDtypes(array, out, names);
  Request request;
  request.operation.kind = kind;
  request.operation.dtype = array.dtype;
  request.operation.input = array.data;
  request.operation.output = out.data;
  Add(request, std::move(array));
  Add(request, std::move(out));
  return request;
}

// Between, where one array holds the blocks of all ranks and the other one this rank's block.
Request OfBlocks(OpKind kind, nb::handle array, nb::handle out, const Counts& counts, int rank,
                 int world_size, const Names& names = {}) {
  Request request = Between(kind, array, out, names);
  const Sized first{names.array.c_str(), request.arguments.data()};
  const Sized second{names.out.c_str(), &request.arguments[1]};
  const bool gathers = kind == OpKind::kAllGather;
  SetBlocks(request.operation, gathers ? first : second, gathers ? second : first, counts, rank,
            world_size, names.counts);
  return request;
}

void CheckNotEmpty(const std::vector<nb::object>& arrays) {
  if (arrays.empty()) RaiseInvalid("there must be at least one array");
}

void CheckLengths(size_t num_arrays, size_t other, const char* what) {
  if (num_arrays == other) return;
  RaiseInvalid("there must be as many " + std::string(what) + " as arrays, which are " +
               std::to_string(num_arrays) + ", got " + std::to_string(other));
}

void CheckGroupDtype(const Request& request, Dtype dtype) {
  if (request.arguments.empty() || request.operation.dtype == dtype) return;
  RaiseInvalid("the arrays of a group must be of one dtype, got " +
               std::string(NameOf(request.operation.dtype)) + " and " + std::string(NameOf(dtype)));
}

// OfBlocks of several pairs of arrays as one operation.
Request GroupOfBlocks(OpKind kind, const std::vector<nb::object>& arrays,
                      const std::vector<nb::object>& outs, const GroupCounts& counts, int rank,
                      int world_size) {
  CheckNotEmpty(arrays);
  CheckLengths(arrays.size(), outs.size(), "outs");
  if (counts.has_value()) CheckLengths(arrays.size(), counts->size(), "counts");
  Request group;
  Operation& operation = group.operation;
  operation.kind = kind;
  std::vector<uint64_t> sums(static_cast<size_t>(world_size));
  for (size_t i = 0; i < arrays.size(); ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    Request one =
        OfBlocks(kind, arrays[i], outs[i], counts ? (*counts)[i] : std::nullopt, rank, world_size,
                 {.array = "arrays" + index, .out = "outs" + index, .counts = "counts" + index});
    CheckGroupDtype(group, one.operation.dtype);
    operation.dtype = one.operation.dtype;
    const std::vector<uint64_t> blocks =
        one.operation.counts.empty() ? std::vector<uint64_t>(sums.size(), one.operation.count)
                                     : one.operation.counts;
    std::ranges::transform(sums, blocks, sums.begin(), std::plus());
    operation.group_counts.insert(operation.group_counts.end(), blocks.begin(), blocks.end());
    const size_t element_bytes = BytesOf(operation.dtype);
    operation.group_input.push_back({one.operation.input, one.arguments[0].count * element_bytes});
    operation.group.push_back({one.operation.output, one.arguments[1].count * element_bytes});
    for (ArrayArgument& argument : one.arguments) Add(group, std::move(argument));
  }
  if (std::ranges::count(sums, sums.front()) == world_size) {
    operation.count = sums.front();
  } else {
    operation.count = Total(sums);
    operation.counts = std::move(sums);
  }
  return group;
}

void CheckPresence(const char* name, nb::handle object, bool is_root) {
  if (object.is_none() != is_root) return;
  RaiseInvalid(std::string(name) + (is_root ? " must be given on the root"
                                            : " must be None on ranks other than the root"));
}

// Gather and scatter on ranks other than the root, which have one array.
Request OneSided(OpKind kind, const char* name, nb::handle object, Access access) {
  ArrayArgument array = ToArray(name, object, access);
  Request request;
  request.operation.kind = kind;
  request.operation.dtype = array.dtype;
  if (access == Access::kRead) {
    request.operation.input = array.data;
  } else {
    request.operation.output = array.data;
  }
  Add(request, std::move(array));
  return request;
}

}  // namespace

Request AllReduceRequest(nb::handle object, const ReductionArguments& reduction) {
  Request request = InPlace(OpKind::kAllReduce, object, Access::kUpdate);
  SetReduction(request, reduction);
  return request;
}

Request AllReduceGroupRequest(const std::vector<nb::object>& arrays,
                              const ReductionArguments& reduction) {
  CheckNotEmpty(arrays);
  Request request;
  request.operation.kind = OpKind::kAllReduce;
  for (const nb::object& object : arrays) {
    ArrayArgument array = ToArray("array", object, Access::kUpdate);
    CheckGroupDtype(request, array.dtype);
    request.operation.dtype = array.dtype;
    request.operation.count += array.count;
    request.operation.group.push_back({array.data, array.count * BytesOf(array.dtype)});
    Add(request, std::move(array));
  }
  SetReduction(request, reduction);
  return request;
}

Request ReduceRequest(nb::handle object, int root, const ReductionArguments& reduction) {
  Request request = InPlace(OpKind::kReduce, object, Access::kUpdate);
  request.operation.root = root;
  SetReduction(request, reduction);
  return request;
}

Request BroadcastRequest(nb::handle object, int root, int rank) {
  const Access access = rank == root ? Access::kRead : Access::kWrite;
  Request request = InPlace(OpKind::kBroadcast, object, access);
  request.operation.root = root;
  return request;
}

Request ReduceScatterRequest(nb::handle array, nb::handle out, const Counts& counts,
                             const ReductionArguments& reduction, int rank, int world_size) {
  Request request = OfBlocks(OpKind::kReduceScatter, array, out, counts, rank, world_size);
  SetReduction(request, reduction);
  return request;
}

Request ReduceScatterGroupRequest(const std::vector<nb::object>& arrays,
                                  const std::vector<nb::object>& outs, const GroupCounts& counts,
                                  const ReductionArguments& reduction, int rank, int world_size) {
  Request request = GroupOfBlocks(OpKind::kReduceScatter, arrays, outs, counts, rank, world_size);
  SetReduction(request, reduction);
  return request;
}

Request AllGatherRequest(nb::handle array, nb::handle out, const Counts& counts, int rank,
                         int world_size) {
  return OfBlocks(OpKind::kAllGather, array, out, counts, rank, world_size);
}

Request AllGatherGroupRequest(const std::vector<nb::object>& arrays,
                              const std::vector<nb::object>& outs, const GroupCounts& counts,
                              int rank, int world_size) {
  return GroupOfBlocks(OpKind::kAllGather, arrays, outs, counts, rank, world_size);
}

Request GatherRequest(nb::handle array, nb::handle out, int root, const Counts& counts, int rank,
                      int world_size) {
  const bool is_root = rank == root;
  CheckPresence("out", out, is_root);
  Request request = is_root ? Between(OpKind::kGather, array, out)
                            : OneSided(OpKind::kGather, "array", array, Access::kRead);
  SetBlocks(request.operation, {"array", request.arguments.data()},
            {"out", is_root ? &request.arguments[1] : nullptr}, counts, rank, world_size);
  request.operation.root = root;
  return request;
}

Request ScatterRequest(nb::handle array, nb::handle out, int root, const Counts& counts, int rank,
                       int world_size) {
  const bool is_root = rank == root;
  CheckPresence("array", array, is_root);
  Request request = is_root ? Between(OpKind::kScatter, array, out)
                            : OneSided(OpKind::kScatter, "out", out, Access::kWrite);
  SetBlocks(request.operation, {"out", &request.arguments[is_root ? 1 : 0]},
            {"array", is_root ? request.arguments.data() : nullptr}, counts, rank, world_size);
  request.operation.root = root;
  return request;
}

Request AllToAllRequest(nb::handle array, nb::handle out, const Counts& send_counts,
                        const Counts& receive_counts, int world_size) {
  Request request = Between(OpKind::kAllToAll, array, out);
  if (send_counts.has_value() != receive_counts.has_value()) {
    RaiseInvalid("send_counts and receive_counts must be given both or not at all");
  }
  const Sized sent{"array", request.arguments.data()};
  const Sized received{"out", &request.arguments[1]};
  if (send_counts.has_value()) {
    Operation& operation = request.operation;
    operation.counts = ReadCounts("send_counts", *send_counts, world_size);
    operation.receive_counts = ReadCounts("receive_counts", *receive_counts, world_size);
    CheckSize(sent, Total(operation.counts), "the sum of send_counts");
    CheckSize(received, Total(operation.receive_counts), "the sum of receive_counts");
    return request;
  }
  SetBlocks(request.operation, {"array", nullptr}, sent, {}, 0, world_size);
  CheckSize(received, sent.array->count, "as many elements as array");
  return request;
}

void SetName(Request& request, std::string_view name) {
  Operation& operation = request.operation;
  operation.name = name;
  // In gather and scatter only the root has the array whose shape could be compared; blocks of an
  // alltoall and arrays of a group have sizes of their own.
  if (!operation.group.empty()) return;
  const bool has_whole = operation.kind == OpKind::kAllReduce ||
                         operation.kind == OpKind::kReduce || operation.kind == OpKind::kBroadcast;
  const bool has_rows =
      operation.kind == OpKind::kAllGather || operation.kind == OpKind::kReduceScatter;
  if (name.empty() || !(has_whole || has_rows)) return;
  const ArrayArgument& array = request.arguments.front();
  if (array.ndim < 2) return;
  for (size_t i = has_rows ? 1 : 0; i < array.ndim; ++i) {
    operation.shape.push_back(static_cast<size_t>(array.shape[i]));
  }
}

}  // namespace sparkdl::bindings
