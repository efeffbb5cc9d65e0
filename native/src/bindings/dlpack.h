// Description of an array on any device from its DLPack capsule, without access to its memory.
#ifndef SPARKDL_BINDINGS_DLPACK_H_
#define SPARKDL_BINDINGS_DLPACK_H_

#include <nanobind/nanobind.h>

namespace sparkdl::bindings {

void DefineDescribeDlpack(nanobind::module_& module);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_DLPACK_H_
