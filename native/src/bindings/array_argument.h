// Python arrays as the core's buffers.
#ifndef SPARKDL_BINDINGS_ARRAY_ARGUMENT_H_
#define SPARKDL_BINDINGS_ARRAY_ARGUMENT_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>

#include "sparkdl/dtype.h"

namespace sparkdl::bindings {

namespace nb = nanobind;

// An array in CPU memory, C-contiguous, and the reference that keeps the memory alive. To be made
// and destroyed with the GIL held.
struct ArrayArgument {
  std::byte* data = nullptr;
  size_t count = 0;
  Dtype dtype = Dtype::kUint8;
  nb::ndarray<nb::ro> reference;
};

enum class Access : uint8_t { kRead, kWrite };

// Raises ParamError, with the argument's name, if it cannot be used.
ArrayArgument ToArray(const char* name, nb::handle object, Access access);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_ARRAY_ARGUMENT_H_
