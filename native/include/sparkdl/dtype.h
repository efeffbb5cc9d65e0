// Element types of the buffers.
#ifndef SPARKDL_DTYPE_H_
#define SPARKDL_DTYPE_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sparkdl {

// The values are sent to other ranks: append only.
enum class Dtype : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kBfloat16 = 2,
  kFloat16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kUint8 = 6,
  kInt8 = 7,
  kInt16 = 8,
  kUint16 = 9,
  kUint32 = 10,
  kUint64 = 11,
  kBool = 12,
};

constexpr size_t BytesOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
    case Dtype::kInt64:
    case Dtype::kUint64:
      return 8;
    case Dtype::kFloat32:
    case Dtype::kInt32:
    case Dtype::kUint32:
      return 4;
    case Dtype::kBfloat16:
    case Dtype::kFloat16:
    case Dtype::kInt16:
    case Dtype::kUint16:
      return 2;
    case Dtype::kUint8:
    case Dtype::kInt8:
    case Dtype::kBool:
      return 1;
  }
  return 0;
}

// Such as "float32"; "an unknown dtype" for an invalid value.
std::string_view NameOf(Dtype dtype);

}  // namespace sparkdl

#endif  // SPARKDL_DTYPE_H_
