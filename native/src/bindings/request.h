// Python's arguments as operations of the core.
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

// How a reduction is asked for.
struct ReductionArguments {
  std::string_view op;
  double prescale;
  double postscale;
};

// Elements of each rank's block; None if all are equal.
using Counts = std::optional<std::vector<int64_t>>;

// The same for each array of a group; None if those of all are equal.
using GroupCounts = std::optional<std::vector<Counts>>;

// All raise ParamError if the arguments cannot be used.
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
// None stands for the array that only the root has.
Request GatherRequest(nb::handle array, nb::handle out, int root, const Counts& counts, int rank,
                      int world_size);
Request ScatterRequest(nb::handle array, nb::handle out, int root, const Counts& counts, int rank,
                       int world_size);
Request AllToAllRequest(nb::handle array, nb::handle out, const Counts& send_counts,
                        const Counts& receive_counts, int world_size);

// Gives the operation its name, and with it the shape that all ranks must agree on.
void SetName(Request& request, std::string_view name);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_REQUEST_H_
