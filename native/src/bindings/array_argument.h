// Conversion of Python arrays to the core's buffers.
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

// An array in CPU memory, and the reference that keeps the memory alive, unless the owner resizes
// the tensor or replaces its memory meanwhile. Must be created and destroyed with the GIL held.
struct ArrayArgument {
  std::byte* data = nullptr;  // C-contiguous: memory of the array, or of the packed copy
  size_t count = 0;
  Dtype dtype = Dtype::kUint8;
  size_t ndim = 0;
  const int64_t* shape = nullptr;
  std::unique_ptr<PackedArray> packed;  // for an array that is not C-contiguous
  nb::object tensor;                    // keeps the memory alive: this one or the next
  nb::ndarray<nb::ro> array;
};

// kWrite: the previous content of the array is not used.
enum class Access : uint8_t { kRead, kWrite, kUpdate };

// Raises ParamError, which names the argument, if the object cannot be used.
ArrayArgument ToArray(const char* name, nb::handle object, Access access);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_ARRAY_ARGUMENT_H_
