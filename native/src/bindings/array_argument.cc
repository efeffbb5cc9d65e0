#include "bindings/array_argument.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/errors.h"
#include "bindings/torch_tensor.h"

namespace sparkdl::bindings {
namespace {

std::optional<Dtype> FromDlpack(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  if (dtype.lanes != 1) return std::nullopt;
  switch (static_cast<Code>(dtype.code)) {
    case Code::Float:
      if (dtype.bits == 32) return Dtype::kFloat32;
      if (dtype.bits == 64) return Dtype::kFloat64;
      if (dtype.bits == 16) return Dtype::kFloat16;
      break;
    case Code::Bfloat:
      if (dtype.bits == 16) return Dtype::kBfloat16;
      break;
    case Code::Int:
      if (dtype.bits == 8) return Dtype::kInt8;
      if (dtype.bits == 16) return Dtype::kInt16;
      if (dtype.bits == 32) return Dtype::kInt32;
      if (dtype.bits == 64) return Dtype::kInt64;
      break;
    case Code::UInt:
      if (dtype.bits == 8) return Dtype::kUint8;
      if (dtype.bits == 16) return Dtype::kUint16;
      if (dtype.bits == 32) return Dtype::kUint32;
      if (dtype.bits == 64) return Dtype::kUint64;
      break;
    case Code::Bool:
      if (dtype.bits == 8) return Dtype::kBool;
      break;
    default:
      break;
  }
  return std::nullopt;
}

[[noreturn]] void Raise(const char* name, const std::string& text) {
  RaiseInvalid(std::string(name) + " " + text);
}

// NumPy's description of a dtype in non-native byte order, such as ">f4"; empty for any other
// object.
std::string SwappedDtype(nb::handle object) {
  const nb::object dtype = nb::getattr(object, "dtype", nb::none());
  if (!nb::hasattr(dtype, "isnative") || nb::cast<bool>(dtype.attr("isnative"))) return {};
  return nb::str(dtype.attr("str")).c_str();
}

// Whether a stride is not a multiple of the element size, as for a field of a structured NumPy
// array.
bool HasOddStrides(nb::handle object) {
  if (!nb::hasattr(object, "strides") || !nb::hasattr(object, "itemsize")) return false;
  const nb::object strides = object.attr("strides");
  const nb::object bytes = object.attr("itemsize");
  if (!nb::isinstance<nb::tuple>(strides) || !nb::isinstance<nb::int_>(bytes)) return false;
  const auto element_bytes = nb::cast<int64_t>(bytes);
  for (const nb::handle stride : strides) {
    if (element_bytes > 0 && nb::cast<int64_t>(stride) % element_bytes != 0) return true;
  }
  return false;
}

[[noreturn]] void RaiseNoArray(const char* name, nb::handle object, Access access) {
  nb::ndarray<nb::ro> readable;
  if (access != Access::kRead && nb::try_cast(object, readable, false)) {
    Raise(name, "is read-only; pass a writable array");
  }
  const std::string swapped = SwappedDtype(object);
  if (!swapped.empty()) {
    Raise(name,
          "has dtype " + swapped + ", which is byte-swapped; pass a copy in native byte order");
  }
  if (HasOddStrides(object)) {
    Raise(name, "has strides that are not multiples of its element size; pass a copy");
  }
  const std::string type = nb::str(nb::handle(object.type())).c_str();
  Raise(name,
        "must be a NumPy array, a torch tensor without gradient or another buffer in CPU memory, "
        "got " +
            type);
}

template <typename Array>
bool IsContiguous(const Array& array, size_t count) {
  if (count == 0) return true;
  int64_t expected = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) != 1 && array.stride(i) != expected) return false;
    expected *= static_cast<int64_t>(array.shape(i));
  }
  return true;
}

// Replaces an argument's memory by contiguous memory into which its array is packed.
template <typename Array>
void PackInto(ArrayArgument& argument, const char* name, const Array& array, Access access) {
  auto packed = std::make_unique<PackedArray>();
  packed->array.data = argument.data;
  packed->array.element_bytes = BytesOf(argument.dtype);
  for (size_t i = 0; i < array.ndim(); ++i) {
    packed->array.shape.push_back(array.shape(i));
    packed->array.strides.push_back(array.stride(i));
  }
  packed->is_read = access != Access::kWrite;
  packed->is_written = access != Access::kRead;
  if (packed->is_written && MayOverlap(packed->array)) {
    Raise(name, "has elements that share memory and cannot all be written; pass a copy");
  }
  packed->elements =
      std::make_unique_for_overwrite<std::byte[]>(argument.count * packed->array.element_bytes);
  argument.data = packed->elements.get();
  argument.packed = std::move(packed);
}

template <typename Array>
ArrayArgument Convert(const char* name, const Array& array, Access access) {
  if (array.device_type() != nb::device::cpu::value) {
    Raise(name, "is on a device of DLPack type " + std::to_string(array.device_type()) +
                    "; only CPU memory can be used");
  }
  const auto dtype = FromDlpack(array.dtype());
  if (!dtype.has_value()) {
    Raise(name,
          "has an unsupported dtype; use float32, float64, bfloat16, float16, int8 to int64, uint8 "
          "to "
          "uint64 or bool");
  }
  ArrayArgument argument;
  argument.count = 1;
  for (size_t i = 0; i < array.ndim(); ++i) argument.count *= array.shape(i);
  if (argument.count > 0 && array.data() == nullptr) {
    Raise(name, "has no memory, as tensors have that only stand for others; pass a plain tensor");
  }
  argument.dtype = *dtype;
  argument.data =
      static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(array.data())));
  argument.ndim = array.ndim();
  argument.shape = array.shape_ptr();
  if (!IsContiguous(array, argument.count)) PackInto(argument, name, array, access);
  return argument;
}

ArrayArgument Holding(ArrayArgument argument, nb::ndarray<nb::ro> array) {
  argument.array = std::move(array);
  return argument;
}

}  // namespace

ArrayArgument ToArray(const char* name, nb::handle object, Access access) {
  if (const auto tensor = TensorView::Of(name, object)) {
    ArrayArgument argument = Convert(name, *tensor, access);
    argument.tensor = nb::borrow(object);
    return argument;
  }
  if (access == Access::kRead) {
    nb::ndarray<nb::ro> array;
    if (nb::try_cast(object, array, false)) return Holding(Convert(name, array, access), array);
  } else {
    nb::ndarray<> array;
    if (nb::try_cast(object, array, false)) {
      return Holding(Convert(name, array, access), nb::ndarray<nb::ro>(array.handle()));
    }
  }
  PyErr_Clear();
  RaiseNoArray(name, object, access);
}

}  // namespace sparkdl::bindings
