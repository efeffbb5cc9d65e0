// Python's arguments as operations of the core.
#ifndef SPARKDL_BINDINGS_REQUEST_H_
#define SPARKDL_BINDINGS_REQUEST_H_

#include <nanobind/nanobind.h>

#include <string_view>

#include "bindings/handle_class.h"
#include "sparkdl/operation.h"

namespace sparkdl::bindings {

// An operation and the arrays that it works on.
struct Request {
  Operation operation;
  Arguments arguments;
};

// All raise TypeError or ValueError if the arguments cannot be used.
Request AllReduceRequest(nb::handle array, std::string_view op);
Request ReduceScatterRequest(nb::handle array, nb::handle out, std::string_view op, int world_size);
Request AllGatherRequest(nb::handle array, nb::handle out, int world_size);
Request BroadcastRequest(nb::handle array, int root);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_REQUEST_H_
