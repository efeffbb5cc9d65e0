#include "reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace sparkdl::tests {
namespace {

bool IsFloat(Dtype dtype) {
  return dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64 || dtype == Dtype::kBfloat16 ||
         dtype == Dtype::kFloat16;
}
bool IsSigned(Dtype dtype) {
  return dtype == Dtype::kInt8 || dtype == Dtype::kInt16 || dtype == Dtype::kInt32 ||
         dtype == Dtype::kInt64;
}

template <typename T>
void Put(T value, std::byte* element) {
  std::memcpy(element, &value, sizeof(value));
}

// The low bytes of a little-endian integer are the narrower integer, wrapped.
void StoreInteger(Dtype dtype, int64_t value, std::byte* element) {
  static_assert(std::endian::native == std::endian::little);
  std::memcpy(element, &value, BytesOf(dtype));
}

int64_t Wrapped(Dtype dtype, int64_t value) {
  const size_t unused_bits = 64 - 8 * BytesOf(dtype);
  const uint64_t shifted = static_cast<uint64_t>(value) << unused_bits;
  if (IsSigned(dtype)) return static_cast<int64_t>(shifted) >> unused_bits;
  return static_cast<int64_t>(shifted >> unused_bits);
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

int64_t ValueAt(Dtype dtype, int rank, size_t index) {
  const auto value = static_cast<int64_t>((index * 7 + static_cast<size_t>(rank) * 5) % 11);
  if (dtype == Dtype::kBool) return (value == 0) == (index % 2 == 0) ? 1 : 0;
  if (IsFloat(dtype) || IsSigned(dtype)) return value - 4;
  return value * 20;  // sums and products of a few wrap in uint8
}

double CombineFloats(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return a * b;
    default:
      return a + b;
  }
}

double ScaleFloat(Dtype dtype, double value, double factor) {
  if (dtype == Dtype::kFloat64) return value * factor;
  return static_cast<float>(value) * static_cast<float>(factor);
}

double ReduceFloats(Dtype dtype, ReduceOp op, int world_size, size_t index, const Scales& scales) {
  double result = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    const auto value = static_cast<double>(ValueAt(dtype, rank, index)) * scales.before;
    result = rank == 0 ? value : CombineFloats(op, result, value);
  }
  if (op == ReduceOp::kAvg) {
    result = dtype == Dtype::kFloat64 ? result / world_size
                                      : static_cast<float>(result) / static_cast<float>(world_size);
  }
  return ScaleFloat(dtype, result, scales.after);
}

int64_t CombineIntegers(Dtype dtype, ReduceOp op, int64_t a, int64_t b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return dtype == Dtype::kBool
                 ? a & b
                 : static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    default:
      return dtype == Dtype::kBool ? a | b : a + b;
  }
}

// Rounded toward zero; a result that does not fit the type becomes the nearest limit of the type.
int64_t ScaleInteger(Dtype dtype, int64_t value, double factor) {
  if (factor == 1.0) return value;
  if (dtype == Dtype::kBool) return static_cast<double>(value) * factor >= 1 ? 1 : 0;
  const int bits = static_cast<int>(8 * BytesOf(dtype)) - (IsSigned(dtype) ? 1 : 0);
  const double end = std::ldexp(1.0, std::min(bits, 62));  // no test scales to more
  const double smallest = IsSigned(dtype) ? -end : 0;
  return static_cast<int64_t>(std::clamp(static_cast<double>(value) * factor, smallest, end - 1));
}

int64_t ReduceIntegers(Dtype dtype, ReduceOp op, int world_size, size_t index,
                       const Scales& scales) {
  int64_t result = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    const int64_t value = ScaleInteger(dtype, ValueAt(dtype, rank, index), scales.before);
    result = rank == 0 ? value : CombineIntegers(dtype, op, result, value);
  }
  // An average of a few small numbers does not wrap; every other result wraps before it is scaled.
  result = op == ReduceOp::kAvg ? result / world_size : Wrapped(dtype, result);
  return ScaleInteger(dtype, result, scales.after);
}

}  // namespace

bool AreSame(const Bytes& a, const Bytes& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

void StoreFloat(Dtype dtype, double value, std::byte* element) {
  switch (dtype) {
    case Dtype::kFloat64:
      return Put(value, element);
    case Dtype::kBfloat16:
      return Put(ToBfloat16(value), element);
    case Dtype::kFloat16:
      return Put(ToFloat16(value), element);
    default:
      return Put(static_cast<float>(value), element);
  }
}

Bytes Elements(Dtype dtype, int rank, size_t first, size_t count) {
  const size_t size = BytesOf(dtype);
  Bytes bytes(count * size);
  for (size_t i = 0; i < count; ++i) {
    const int64_t value = ValueAt(dtype, rank, first + i);
    std::byte* const element = bytes.data() + i * size;
    if (IsFloat(dtype)) {
      StoreFloat(dtype, static_cast<double>(value), element);
    } else {
      StoreInteger(dtype, value, element);
    }
  }
  return bytes;
}

Bytes Reduced(Dtype dtype, ReduceOp op, int world_size, size_t first, size_t count,
              const Scales& scales) {
  const size_t size = BytesOf(dtype);
  Bytes bytes(count * size);
  for (size_t i = 0; i < count; ++i) {
    std::byte* const element = bytes.data() + i * size;
    if (IsFloat(dtype)) {
      StoreFloat(dtype, ReduceFloats(dtype, op, world_size, first + i, scales), element);
    } else {
      StoreInteger(dtype, ReduceIntegers(dtype, op, world_size, first + i, scales), element);
    }
  }
  return bytes;
}

}  // namespace sparkdl::tests
