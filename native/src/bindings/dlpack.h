// What a DLPack capsule says of an array on any device, whose memory is not looked at.
#ifndef SPARKDL_BINDINGS_DLPACK_H_
#define SPARKDL_BINDINGS_DLPACK_H_

#include <nanobind/nanobind.h>

namespace sparkdl::bindings {

void DefineDescribeDlpack(nanobind::module_& module);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_DLPACK_H_
