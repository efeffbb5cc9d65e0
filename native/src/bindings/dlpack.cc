#include "bindings/dlpack.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <string>
#include <tuple>

namespace sparkdl::bindings {
namespace {

namespace nb = nanobind;

std::string NameOf(nb::dlpack::dtype dtype) {
  const std::string bits = std::to_string(dtype.bits);
  if (dtype.lanes != 1) return bits + "-bit vectors";
  switch (static_cast<nb::dlpack::dtype_code>(dtype.code)) {
    case nb::dlpack::dtype_code::Int:
      return "int" + bits;
    case nb::dlpack::dtype_code::UInt:
      return "uint" + bits;
    case nb::dlpack::dtype_code::Float:
      return "float" + bits;
    case nb::dlpack::dtype_code::Bfloat:
      return "bfloat" + bits;
    case nb::dlpack::dtype_code::Complex:
      return "complex" + bits;
    case nb::dlpack::dtype_code::Bool:
      return "bool";
    default:
      return "DLPack type " + std::to_string(dtype.code) + " of " + bits + " bits";
  }
}

std::tuple<uintptr_t, size_t, std::string, bool, int, int> Describe(nb::handle capsule) {
  const auto array = nb::cast<nb::ndarray<nb::ro>>(capsule);
  bool contiguous = true;
  int64_t expected = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) != 1 && array.stride(i) != expected) contiguous = false;
    expected *= static_cast<int64_t>(array.shape(i));
  }
  return {reinterpret_cast<uintptr_t>(array.data()), array.size(),        NameOf(array.dtype()),
          contiguous || array.size() == 0,           array.device_type(), array.device_id()};
}

}  // namespace

void DefineDescribeDlpack(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def("describe_dlpack", &Describe, "capsule"_a,
             "Return address, number of elements, dtype, whether C-contiguous, DLPack's device "
             "type and device id of the array in a capsule that __dlpack__ returned. Consumes "
             "the capsule; the caller must keep the array alive.");
}

}  // namespace sparkdl::bindings
