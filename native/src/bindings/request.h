// Conversion of Python's arguments to operations of the core.
#ifndef SPARKDL_BINDINGS_REQUEST_H_
#define SPARKDL_BINDINGS_REQUEST_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "bindings/handle_class.h"
#include "sparkdl/operation.h"

namespace sparkdl::bindings {

// An operation and the arrays that it works on.
struct Request {
  Operation operation;
  Arguments arguments;
};

// Parameters of a reduction as the caller gives them.
struct ReductionArguments {
  std::string_view op;
  double prescale;
  double postscale;
};

// Number of elements of each rank's block; None if all blocks are equal.
using Counts = std::optional<std::vector<int64_t>>;

// Counts of each array of a group; None if the blocks of every array are equal.
using GroupCounts = std::optional<std::vector<Counts>>;

// All functions raise ParamError if the arguments cannot be used.
Request AllReduceRequest(nb::handle array, const ReductionArguments& reduction);
Request AllReduceGroupRequest(const std::vector<nb::object>& arrays,
                              const ReductionArguments& reduction);
Request ReduceRequest(nb::handle array, int root, const ReductionArguments& reduction);
Request ReduceScatterRequest(nb::handle array, nb::handle out, const Counts& counts,
                             const ReductionArguments& reduction, int rank, int world_size);
Request ReduceScatterGroupRequest(const std::vector<nb::object>& arrays,
                                  const std::vector<nb::object>& outs, const GroupCounts& counts,
                                  const ReductionArguments& reduction, int rank, int world_size);
Request AllGatherGroupRequest(const std::vector<nb::object>& arrays,
                              const std::vector<nb::object>& outs, const GroupCounts& counts,
                              int rank, int world_size);
Request AllGatherRequest(nb::handle array, nb::handle out, const Counts& counts, int rank,
                         int world_size);
// The root's array is only read.
Request BroadcastRequest(nb::handle array, int root, int rank);
// An array that only the root has is None on the other ranks.
Request GatherRequest(nb::handle array, nb::handle out, int root, const Counts& counts, int rank,
                      int world_size);
Request ScatterRequest(nb::handle array, nb::handle out, int root, const Counts& counts, int rank,
                       int world_size);
Request AllToAllRequest(nb::handle array, nb::handle out, const Counts& send_counts,
                        const Counts& receive_counts, int world_size);

// Sets the name of an operation and, with it, the shape on which all ranks must agree.
void SetName(Request& request, std::string_view name);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_REQUEST_H_
