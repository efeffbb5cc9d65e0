// Python's NcclLibrary, NcclOperation and NcclCommunicator.
#ifndef SPARKDL_BINDINGS_NCCL_CLASS_H_
#define SPARKDL_BINDINGS_NCCL_CLASS_H_

#include <nanobind/nanobind.h>

namespace sparkdl::bindings {

void DefineNccl(nanobind::module_& module);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_NCCL_CLASS_H_
