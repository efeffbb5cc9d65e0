// Python's Communicator.
#ifndef SPARKDL_BINDINGS_COMMUNICATOR_CLASS_H_
#define SPARKDL_BINDINGS_COMMUNICATOR_CLASS_H_

#include <nanobind/nanobind.h>

namespace sparkdl::bindings {

void DefineCommunicator(nanobind::module_& module);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_COMMUNICATOR_CLASS_H_
