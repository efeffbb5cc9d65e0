// Decoding, encoding and rounding of the 16-bit floating-point types by every instruction set.
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "instruction_sets.h"
#include "reference.h"

namespace sparkdl::tests {
namespace {

TEST(AllSixteenBitNumbersSurviveDecodingAndEncoding) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    for (const ReduceKernels* kernels : KernelsOfAllSets(dtype, ReduceOp::kSum)) {
      const uint32_t infinity = dtype == Dtype::kBfloat16 ? 0x7f80 : 0x7c00;
      std::vector<uint16_t> out(all.size());
      const void* sources[] = {all.data()};
      kernels->reduce(out.data(), sources, 1, all.size(), {});
      for (size_t i = 0; i < all.size(); ++i) {
        const bool is_nan = (i & 0x7fffU) > infinity;
        if (is_nan) {
          CHECK((out[i] & 0x7fffU) > infinity);
        } else {
          CHECK_EQ(out[i], all[i]);
        }
      }
    }
  }
}

// Numbers of all relevant sizes, with more digits than the narrow types hold.
std::vector<float> LongNumbers() {
  std::vector<float> values;
  for (int i = 0; i < 20'000; ++i) {
    const float value = std::ldexp(1.0F + static_cast<float>(i) / 16384.0F, i % 20 - 16);
    values.push_back(i % 3 == 0 ? -value : value);
  }
  return values;
}

TEST(AccumulatorsAreRoundedOnceToNearestEven) {
  const std::vector<float> values = LongNumbers();
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    for (const ReduceKernels* kernels : KernelsOfAllSets(dtype, ReduceOp::kSum)) {
      for (const double factor : {1.0, 0.3}) {
        std::vector<uint16_t> out(values.size());
        kernels->finalize(out.data(), values.data(), values.size(),
                          {.divisor = 1, .factor = factor});
        for (size_t i = 0; i < values.size(); ++i) {
          uint16_t expected = 0;
          StoreFloat(dtype, values[i] * static_cast<float>(factor),
                     reinterpret_cast<std::byte*>(&expected));
          CHECK_EQ(out[i], expected);
        }
      }
    }
  }
}

TEST(ScalingRoundsToNearestEven) {
  const std::vector<float> values = LongNumbers();
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    for (const ReduceKernels* kernels : KernelsOfAllSets(dtype, ReduceOp::kSum)) {
      std::vector<uint16_t> narrow(values.size());
      std::vector<float> decoded(values.size());
      kernels->finalize(narrow.data(), values.data(), values.size(), {});
      const void* sources[] = {narrow.data()};
      kernels->reduce_to_accumulators(decoded.data(), sources, 1, narrow.size());
      kernels->scale(narrow.data(), narrow.data(), narrow.size(), 0.3);
      for (size_t i = 0; i < values.size(); ++i) {
        uint16_t expected = 0;
        StoreFloat(dtype, decoded[i] * 0.3F, reinterpret_cast<std::byte*>(&expected));
        CHECK_EQ(narrow[i], expected);
      }
    }
  }
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
