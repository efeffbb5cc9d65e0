// The reduction loops of every instruction set of this machine.
#include "sparkdl/reduce/reduce.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "instruction_sets.h"
#include "reference.h"

namespace sparkdl::tests {
namespace {

// Checks that all ways to reduce `inputs` give the expected result; the last of them reduces in
// place.
void CheckAllWays(const ReduceKernels& kernels, std::vector<Bytes> inputs, const Finish& finish,
                  const Bytes& expected) {
  const size_t count = expected.size() / kernels.element_bytes;
  std::vector<const void*> sources;
  for (const Bytes& input : inputs) sources.push_back(input.data());

  Bytes out(expected.size());
  kernels.reduce(out.data(), sources.data(), sources.size(), count, finish);
  CHECK(out == expected);

  Bytes together(count * kernels.accumulator_bytes);
  kernels.reduce_to_accumulators(together.data(), sources.data(), sources.size(), count);
  Bytes one_by_one(together.size());
  kernels.reduce_to_accumulators(one_by_one.data(), sources.data(), 1, count);
  for (size_t rank = 1; rank < sources.size(); ++rank) {
    Bytes partial(one_by_one.size());
    kernels.reduce_to_accumulators(partial.data(), &sources[rank], 1, count);
    kernels.combine(one_by_one.data(), partial.data(), count);
  }
  CHECK(one_by_one == together);
  Bytes finished(expected.size());
  kernels.finalize(finished.data(), together.data(), count, finish);
  CHECK(finished == expected);

  kernels.reduce(inputs[0].data(), sources.data(), sources.size(), count, finish);
  CHECK(inputs[0] == expected);
}

TEST(EveryInstructionSetAgreesWithTheReference) {
  constexpr size_t kCount = 2077;
  for (const Dtype dtype : kDtypes) {
    for (const ReduceOp op : kReduceOps) {
      if (!CanReduce(dtype, op)) continue;
      for (const int world_size : {1, 2, 3, 5}) {
        for (const double factor : {1.0, 0.75}) {
          std::vector<Bytes> inputs;
          for (int rank = 0; rank < world_size; ++rank) {
            inputs.push_back(Elements(dtype, rank, 0, kCount));
          }
          const Bytes expected =
              Reduced(dtype, op, world_size, 0, kCount, {.before = 1.0, .after = factor});
          const Finish finish{.divisor = static_cast<uint64_t>(world_size), .factor = factor};
          for (const ReduceKernels* kernels : KernelsOfAllSets(dtype, op)) {
            CheckAllWays(*kernels, inputs, finish, expected);
          }
        }
      }
    }
  }
}

// The dtype of T.
template <typename T>
constexpr Dtype kDtypeOf = Dtype::kUint8;
template <>
constexpr Dtype kDtypeOf<int8_t> = Dtype::kInt8;
template <>
constexpr Dtype kDtypeOf<int16_t> = Dtype::kInt16;
template <>
constexpr Dtype kDtypeOf<uint16_t> = Dtype::kUint16;
template <>
constexpr Dtype kDtypeOf<int32_t> = Dtype::kInt32;
template <>
constexpr Dtype kDtypeOf<uint32_t> = Dtype::kUint32;
template <>
constexpr Dtype kDtypeOf<int64_t> = Dtype::kInt64;
template <>
constexpr Dtype kDtypeOf<uint64_t> = Dtype::kUint64;

template <typename T>
T ReduceTwo(const ReduceKernels& kernels, T a, T b, const Finish& finish) {
  const void* sources[] = {&a, &b};
  T out{};
  kernels.reduce(&out, sources, 2, 1, finish);
  return out;
}

template <typename T>
void CheckExtremes() {
  constexpr T kMin = std::numeric_limits<T>::min();
  constexpr T kMax = std::numeric_limits<T>::max();
  const Dtype dtype = kDtypeOf<T>;
  const Finish finish{.divisor = 2, .factor = 1.0};
  for (const ReduceKernels* sum : KernelsOfAllSets(dtype, ReduceOp::kSum)) {
    CHECK(ReduceTwo<T>(*sum, kMax, 1, finish) == kMin);
    T out{};
    sum->scale(&out, &kMax, 1, 2.0);
    CHECK(out == kMax);
    sum->scale(&out, &kMax, 1, -2.0);
    CHECK(out == kMin);
    sum->scale(&out, &kMax, 1, std::numeric_limits<double>::quiet_NaN());
    CHECK(out == 0);
    CHECK(ReduceTwo<T>(*sum, kMax, 0, {.divisor = 2, .factor = 3.0}) == kMax);
  }
  for (const ReduceKernels* product : KernelsOfAllSets(dtype, ReduceOp::kProduct)) {
    CHECK(ReduceTwo<T>(*product, kMax, 2, finish) == static_cast<T>(-2));
  }
  for (const ReduceKernels* largest : KernelsOfAllSets(dtype, ReduceOp::kMax)) {
    CHECK(ReduceTwo<T>(*largest, kMin, kMax, finish) == kMax);
  }
  for (const ReduceKernels* smallest : KernelsOfAllSets(dtype, ReduceOp::kMin)) {
    CHECK(ReduceTwo<T>(*smallest, kMin, kMax, finish) == kMin);
  }
  for (const ReduceKernels* average : KernelsOfAllSets(dtype, ReduceOp::kAvg)) {
    if (sizeof(T) < 8) CHECK(ReduceTwo<T>(*average, kMax, kMax, finish) == kMax);
    CHECK(ReduceTwo<T>(*average, kMax, 0, {.divisor = 2, .factor = 100.0}) == kMax);
  }
}

TEST(IntegerSumsWrapAndScaledIntegersSaturate) {
  CheckExtremes<int8_t>();
  CheckExtremes<uint8_t>();
  CheckExtremes<int16_t>();
  CheckExtremes<uint16_t>();
  CheckExtremes<int32_t>();
  CheckExtremes<uint32_t>();
  CheckExtremes<int64_t>();
  CheckExtremes<uint64_t>();
}

TEST(AveragesOfNegativeIntegersRoundTowardZero) {
  for (const ReduceKernels* average : KernelsOfAllSets(Dtype::kInt8, ReduceOp::kAvg)) {
    CHECK_EQ(ReduceTwo<int8_t>(*average, -4, -3, {.divisor = 2, .factor = 1.0}), -3);
  }
}

TEST(AnyByteButZeroIsTrue) {
  const uint8_t a[] = {0, 0, 7, 255};
  const uint8_t b[] = {0, 2, 0, 128};
  const void* sources[] = {a, b};
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kMin}) {
    const bool is_or = op == ReduceOp::kSum || op == ReduceOp::kMax;
    for (const ReduceKernels* kernels : KernelsOfAllSets(Dtype::kBool, op)) {
      uint8_t out[4];
      kernels->reduce(out, sources, 2, 4, {});
      for (int i = 0; i < 4; ++i) CHECK_EQ(int{out[i]}, is_or ? (i > 0 ? 1 : 0) : i / 3);
    }
  }
  CHECK(FindReduceKernels(Dtype::kBool, ReduceOp::kAvg) == nullptr);
}

TEST(NanOnEitherSideIsTheResultOfMinAndMax) {
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (const ReduceKernels* kernels : KernelsOfAllSets(Dtype::kFloat32, op)) {
      const std::vector<float> numbers(37, 1.0F);
      const std::vector<float> nans(37, std::numeric_limits<float>::quiet_NaN());
      for (const bool nan_first : {true, false}) {
        const void* sources[] = {nan_first ? nans.data() : numbers.data(),
                                 nan_first ? numbers.data() : nans.data()};
        std::vector<float> out(37);
        kernels->reduce(out.data(), sources, 2, out.size(), {});
        CHECK(std::isnan(out[0]) && std::isnan(out[36]));
      }
    }
  }
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
