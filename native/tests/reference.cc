#include "reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace sparkdl::tests {
namespace {

template <typename T>
void Put(T value, std::byte* element) {
  std::memcpy(element, &value, sizeof(value));
}

uint16_t ToBfloat16(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  const double unit = std::ldexp(1.0, exponent - 8);
  const auto rounded = static_cast<float>(std::nearbyint(value / unit) * unit);
  const float finite = value == 0 ? static_cast<float>(value) : rounded;  // keeps the zero's sign
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(finite) >> 16);
}

uint16_t ToFloat16(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(value);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent, -13);
  auto mantissa = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 11 - exponent)));
  // Adding carries a mantissa that was rounded up to the next power of two into the exponent.
  const uint32_t bits = mantissa == 0 ? 0 : static_cast<uint32_t>(exponent + 13) * 1024U + mantissa;
  return static_cast<uint16_t>(sign | bits);
}

double Combine(Dtype dtype, ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      // Wrapped at once: a double holds no product of many exactly.
      return dtype == Dtype::kUint8 ? std::fmod(a * b, 256) : a * b;
    default:
      return a + b;
  }
}

double Average(Dtype dtype, double sum, int world_size) {
  switch (dtype) {
    case Dtype::kFloat64:
      return sum / world_size;
    case Dtype::kFloat32:
    case Dtype::kBfloat16:
    case Dtype::kFloat16:
      return static_cast<float>(sum) / static_cast<float>(world_size);
    default:
      return std::trunc(sum / world_size);
  }
}

}  // namespace

double ValueAt(Dtype dtype, int rank, size_t index) {
  const auto value = static_cast<double>((index * 7 + static_cast<size_t>(rank) * 5) % 11);
  if (dtype == Dtype::kUint8) return value * 20;
  return value - 4;
}

void Store(Dtype dtype, double value, std::byte* element) {
  switch (dtype) {
    case Dtype::kFloat32:
      return Put(static_cast<float>(value), element);
    case Dtype::kFloat64:
      return Put(value, element);
    case Dtype::kBfloat16:
      return Put(ToBfloat16(value), element);
    case Dtype::kFloat16:
      return Put(ToFloat16(value), element);
    case Dtype::kInt32:
      return Put(static_cast<int32_t>(value), element);
    case Dtype::kInt64:
      return Put(static_cast<int64_t>(value), element);
    default:
      return Put(static_cast<uint8_t>(static_cast<uint64_t>(value)), element);
  }
}

Bytes Elements(Dtype dtype, int rank, size_t first, size_t count) {
  const size_t size = BytesOf(dtype);
  Bytes bytes(count * size);
  for (size_t i = 0; i < count; ++i) {
    Store(dtype, ValueAt(dtype, rank, first + i), bytes.data() + i * size);
  }
  return bytes;
}

Bytes Reduced(Dtype dtype, ReduceOp op, int world_size, size_t first, size_t count) {
  const size_t size = BytesOf(dtype);
  Bytes bytes(count * size);
  for (size_t i = 0; i < count; ++i) {
    double value = ValueAt(dtype, 0, first + i);
    for (int rank = 1; rank < world_size; ++rank) {
      value = Combine(dtype, op, value, ValueAt(dtype, rank, first + i));
    }
    if (op == ReduceOp::kAvg) value = Average(dtype, value, world_size);
    Store(dtype, value, bytes.data() + i * size);
  }
  return bytes;
}

}  // namespace sparkdl::tests
