// Element types for the reduction loops: unaligned access, wrapping integers, bfloat16 and float16.
// Compiled once per instruction set; see kernels.h for what is not allowed here.
#ifndef SPARKDL_KERNEL_NAMESPACE
#error "define SPARKDL_KERNEL_NAMESPACE to the name of the instruction set"
#endif

#include <cstddef>
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace sparkdl::SPARKDL_KERNEL_NAMESPACE {
namespace {  // NOLINT(google-build-namespaces): internal linkage is the point, see kernels.h

// A T at any address that may alias anything, because buffers are passed in as bytes.
template <typename T>
struct [[gnu::packed, gnu::may_alias]] Loose {
  T value;
};

template <typename T, typename U>
constexpr bool kIsSame = false;
template <typename T>
constexpr bool kIsSame<T, T> = true;

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename T>
constexpr bool kIsFloat = kIsSame<T, float> || kIsSame<T, double>;

// A byte that holds 0 or 1.
struct Bool {
  uint8_t byte;
};

// The C++ type that computes with an element.
template <typename T>
struct NumberOfElement {
  using Type = T;
};
template <>
struct NumberOfElement<Bfloat16> {
  using Type = float;
};
template <>
struct NumberOfElement<Float16> {
  using Type = float;
};
template <>
struct NumberOfElement<Bool> {
  using Type = uint8_t;
};
template <typename T>
using NumberOf = typename NumberOfElement<T>::Type;

// Overflow of signed integers is undefined in C++, also of the type to which short integers are
// promoted. 64-bit unsigned arithmetic gives the same low bits and wraps.
template <typename A>
A WrapAdd(A a, A b) {
  if constexpr (kIsFloat<A>) {
    return a + b;
  } else {
    return static_cast<A>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
}
template <typename A>
A WrapMultiply(A a, A b) {
  if constexpr (kIsFloat<A>) {
    return a * b;
  } else {
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
}

// value * factor. A product that does not fit the integer type T becomes the nearest limit of T; a
// NaN becomes 0.
template <typename T, typename A>
A Scaled(A value, double factor) {
  if constexpr (kIsFloat<A>) {
    return value * static_cast<A>(factor);
  } else {
    constexpr bool kSigned = static_cast<T>(-1) < static_cast<T>(0);
    constexpr int kBits = static_cast<int>(sizeof(T)) * 8 - (kSigned ? 1 : 0);
    constexpr A kLargest = static_cast<A>(~uint64_t{0} >> (64 - kBits));
    constexpr A kSmallest = kSigned ? static_cast<A>(-kLargest - 1) : A{0};
    // Exact: a power of two.
    constexpr double kEnd = 2.0 * static_cast<double>(uint64_t{1} << (kBits - 1));
    const double product = static_cast<double>(value) * factor;
    if (product != product) return 0;
    if (product >= kEnd) return kLargest;
    if (product <= (kSigned ? -kEnd : 0.0)) return kSmallest;
    return static_cast<A>(product);
  }
}

template <typename T, typename A>
void Decode(const Loose<T>* source, A* out, size_t n) {
  // NOLINTNEXTLINE(bugprone-signed-char-misuse): int8 is a number here, whose sign is to stay
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<A>(source[i].value);
}
template <typename A, typename T>
void Encode(const A* values, Loose<T>* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i].value = static_cast<T>(values[i]);
}

// Any byte but 0 is true.
inline void Decode(const Loose<Bool>* source, uint8_t* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = source[i].value.byte != 0 ? 1 : 0;
}
inline void Encode(const uint8_t* values, Loose<Bool>* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i].value.byte = values[i] != 0 ? 1 : 0;
}

inline void Decode(const Loose<Bfloat16>* source, float* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const auto bits = static_cast<uint32_t>(source[i].value.bits) << 16;
    out[i] = __builtin_bit_cast(float, bits);
  }
}

// Rounds to nearest even; a NaN becomes a quiet NaN of the same sign.
inline void Encode(const float* values, Loose<Bfloat16>* out, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const auto bits = __builtin_bit_cast(uint32_t, values[i]);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40U;
    const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
    out[i].value.bits = static_cast<uint16_t>(is_nan ? quiet : rounded);
  }
}

// The conversions between float16 and float32 in integer arithmetic follow Fabian Giesen,
// https://gist.github.com/rygorous/2156668 (public domain).
inline float DecodeFloat16(uint16_t half) {
  constexpr uint32_t kExponent = 0x7c00U << 13;
  uint32_t bits = (half & 0x7fffU) << 13;
  const uint32_t exponent = bits & kExponent;
  bits += (127U - 15U) << 23;
  if (exponent == kExponent) {
    bits += (128U - 16U) << 23;
  } else if (exponent == 0) {
    constexpr uint32_t kMagic = 113U << 23;
    bits += 1U << 23;
    bits = __builtin_bit_cast(uint32_t,
                              __builtin_bit_cast(float, bits) - __builtin_bit_cast(float, kMagic));
  }
  bits |= (half & 0x8000U) << 16;
  return __builtin_bit_cast(float, bits);
}

// Rounds to nearest even. A value that is too large becomes infinite; a NaN remains a NaN.
inline uint16_t EncodeFloat16(float value) {
  constexpr uint32_t kInfinity = 255U << 23;
  constexpr uint32_t kTooLarge = (127U + 16U) << 23;
  constexpr uint32_t kSmallestNormal = 113U << 23;
  constexpr uint32_t kSubnormalMagic = ((127U - 15U) + (23U - 10U) + 1U) << 23;
  auto bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t sign = bits & 0x80000000U;
  bits ^= sign;
  uint32_t half = 0;
  if (bits >= kTooLarge) {
    half = bits > kInfinity ? 0x7e00U : 0x7c00U;
  } else if (bits < kSmallestNormal) {
    const float shifted =
        __builtin_bit_cast(float, bits) + __builtin_bit_cast(float, kSubnormalMagic);
    half = __builtin_bit_cast(uint32_t, shifted) - kSubnormalMagic;
  } else {
    const uint32_t is_odd = (bits >> 13) & 1U;
    bits += 0xfffU + is_odd - ((127U - 15U) << 23);
    half = bits >> 13;
  }
  return static_cast<uint16_t>(half | (sign >> 16));
}

inline void Decode(const Loose<Float16>* source, float* out, size_t n) {
  size_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
  for (; i + 8 <= n; i += 8) {
    __m128i halves;
    __builtin_memcpy(&halves, source + i, sizeof(halves));
    const __m256 values = _mm256_cvtph_ps(halves);
    __builtin_memcpy(out + i, &values, sizeof(values));
  }
#endif
  for (; i < n; ++i) out[i] = DecodeFloat16(source[i].value.bits);
}

inline void Encode(const float* values, Loose<Float16>* out, size_t n) {
  size_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
  for (; i + 8 <= n; i += 8) {
    __m256 floats;
    __builtin_memcpy(&floats, values + i, sizeof(floats));
    const __m128i halves = _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __builtin_memcpy(out + i, &halves, sizeof(halves));
  }
#endif
  for (; i < n; ++i) out[i].value.bits = EncodeFloat16(values[i]);
}

}  // namespace
}  // namespace sparkdl::SPARKDL_KERNEL_NAMESPACE
