// Python arrays as the core's buffers.
#ifndef SPARKDL_BINDINGS_ARRAY_ARGUMENT_H_
#define SPARKDL_BINDINGS_ARRAY_ARGUMENT_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "sparkdl/dtype.h"
#include "sparkdl/strided.h"

namespace sparkdl::bindings {

namespace nb = nanobind;

// An array in CPU memory, and the reference that keeps the memory alive, unless its owner resizes a
// tensor or gives it other memory meanwhile. To be made and destroyed with the GIL held.
struct ArrayArgument {
  std::byte* data = nullptr;  // C-contiguous: the array's memory, or the packed one
  size_t count = 0;
  Dtype dtype = Dtype::kUint8;
  size_t ndim = 0;
  const int64_t* shape = nullptr;
  std::unique_ptr<PackedArray> packed;  // of an array that is not C-contiguous
  nb::object tensor;                    // what of the two is given holds the memory
  nb::ndarray<nb::ro> array;
};

// kWrite: what the array holds before does not matter.
enum class Access : uint8_t { kRead, kWrite, kUpdate };

// Raises ParamError, with the argument's name, if it cannot be used.
ArrayArgument ToArray(const char* name, nb::handle object, Access access);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_ARRAY_ARGUMENT_H_
