// The elements of the stand-in for NCCL: read and written as double, which is exact for the values
// of the tests.
#ifndef SPARKDL_TESTS_STAND_IN_ELEMENTS_H_
#define SPARKDL_TESTS_STAND_IN_ELEMENTS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace stand_in {

enum Type {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16
};
enum Reduction { kSum, kProduct, kMax, kMin, kAvg, kFirstOfOwn };

inline size_t BytesOf(int type) {
  constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kBytes[type];
}

template <typename T>
double LoadAs(const char* data) {
  T value;
  std::memcpy(&value, data, sizeof(value));
  return static_cast<double>(value);
}

template <typename T>
void StoreAs(char* data, double value) {
  const T converted = static_cast<T>(value);
  std::memcpy(data, &converted, sizeof(converted));
}

inline double LoadFloat16(const char* data) {
  uint16_t bits = 0;
  std::memcpy(&bits, data, sizeof(bits));
  const int exponent = (bits >> 10) & 31;
  const double fraction = (bits & 1023) / 1024.0;
  const double size =
      exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15);
  return (bits & 0x8000) != 0 ? -size : size;
}

// Only for numbers that float16 represents exactly; the tests use no others.
inline void StoreFloat16(char* data, double value) {
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(value), &exponent);
  uint16_t bits = 0;
  if (value != 0)
    bits = static_cast<uint16_t>(((exponent + 14) << 10) | std::lround((2 * fraction - 1) * 1024));
  if (value < 0) bits |= 0x8000;
  std::memcpy(data, &bits, sizeof(bits));
}

inline double LoadBfloat16(const char* data) {
  uint32_t bits = 0;
  std::memcpy(reinterpret_cast<char*>(&bits) + 2, data, 2);
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void StoreBfloat16(char* data, double value) {
  const float narrow = static_cast<float>(value);
  std::memcpy(data, reinterpret_cast<const char*>(&narrow) + 2, 2);
}

inline double Load(int type, const char* data) {
  switch (type) {
    case kInt8:
      return LoadAs<int8_t>(data);
    case kUint8:
      return LoadAs<uint8_t>(data);
    case kInt32:
      return LoadAs<int32_t>(data);
    case kUint32:
      return LoadAs<uint32_t>(data);
    case kInt64:
      return LoadAs<int64_t>(data);
    case kUint64:
      return LoadAs<uint64_t>(data);
    case kFloat16:
      return LoadFloat16(data);
    case kFloat32:
      return LoadAs<float>(data);
    case kFloat64:
      return LoadAs<double>(data);
    default:
      return LoadBfloat16(data);
  }
}

inline void Store(int type, char* data, double value) {
  switch (type) {
    case kInt8:
      return StoreAs<int8_t>(data, value);
    case kUint8:
      return StoreAs<uint8_t>(data, value);
    case kInt32:
      return StoreAs<int32_t>(data, value);
    case kUint32:
      return StoreAs<uint32_t>(data, value);
    case kInt64:
      return StoreAs<int64_t>(data, value);
    case kUint64:
      return StoreAs<uint64_t>(data, value);
    case kFloat16:
      return StoreFloat16(data, value);
    case kFloat32:
      return StoreAs<float>(data, value);
    case kFloat64:
      return StoreAs<double>(data, value);
    default:
      return StoreBfloat16(data, value);
  }
}

inline double Combine(int reduction, double a, double b) {
  switch (reduction) {
    case kProduct:
      return a * b;
    case kMax:
      return std::max(a, b);
    case kMin:
      return std::min(a, b);
    default:
      return a + b;
  }
}

}  // namespace stand_in

#endif  // SPARKDL_TESTS_STAND_IN_ELEMENTS_H_
