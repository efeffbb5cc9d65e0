// The reduction loops of every instruction set of this machine.
#include "sparkdl/reduce.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "reference.h"

namespace sparkdl::tests {
namespace {

constexpr const char* kInstructionSets[] = {"baseline", "avx2", "avx512"};

TEST(EveryInstructionSetAgreesWithTheReference) {
  for (const char* set : kInstructionSets) {
    for (const Dtype dtype : kReducible) {
      for (const ReduceOp op : kReduceOps) {
        const ReduceKernels* kernels = FindReduceKernelsFor(set, dtype, op);
        if (kernels == nullptr) continue;  // this machine lacks the instruction set
        for (const int world_size : {1, 2, 3, 5}) {
          constexpr size_t kCount = 2077;
          std::vector<Bytes> inputs;
          std::vector<const void*> sources;
          for (int rank = 0; rank < world_size; ++rank) {
            inputs.push_back(Elements(dtype, rank, 0, kCount));
          }
          for (const Bytes& input : inputs) sources.push_back(input.data());
          const Bytes expected = Reduced(dtype, op, world_size, 0, kCount);
          const auto divisor = static_cast<uint64_t>(world_size);

          Bytes out(expected.size());
          kernels->reduce(out.data(), sources.data(), sources.size(), kCount, divisor);
          CHECK(out == expected);

          Bytes accumulators(kCount * kernels->accumulator_bytes);
          kernels->reduce_to_accumulators(accumulators.data(), sources.data(), 1, kCount);
          for (int rank = 1; rank < world_size; ++rank) {
            Bytes partial(accumulators.size());
            kernels->reduce_to_accumulators(partial.data(), &sources[rank], 1, kCount);
            kernels->combine(accumulators.data(), partial.data(), kCount);
          }
          Bytes finished(expected.size());
          kernels->finalize(finished.data(), accumulators.data(), kCount, divisor);
          CHECK(finished == expected);

          kernels->reduce(inputs[0].data(), sources.data(), sources.size(), kCount, divisor);
          CHECK(inputs[0] == expected);
        }
      }
    }
  }
}

// Sends numbers through a type's decoding and encoding.
void PassThrough(const ReduceKernels& kernels, const void* in, void* out, size_t count) {
  const void* sources[] = {in};
  kernels.reduce(out, sources, 1, count, 1);
}

TEST(AllSixteenBitNumbersSurviveDecodingAndEncoding) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const char* set : kInstructionSets) {
    for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
      const ReduceKernels* kernels = FindReduceKernelsFor(set, dtype, ReduceOp::kSum);
      if (kernels == nullptr) continue;
      const uint32_t infinity = dtype == Dtype::kBfloat16 ? 0x7f80 : 0x7c00;
      std::vector<uint16_t> out(all.size());
      PassThrough(*kernels, all.data(), out.data(), all.size());
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

TEST(NarrowTypesRoundToNearestEven) {
  for (const char* set : kInstructionSets) {
    for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
      const ReduceKernels* kernels = FindReduceKernelsFor(set, dtype, ReduceOp::kSum);
      if (kernels == nullptr) continue;
      std::vector<float> values;
      for (int i = 0; i < 20'000; ++i) {
        const float value = std::ldexp(1.0F + static_cast<float>(i) / 16384.0F, i % 20 - 16);
        values.push_back(i % 3 == 0 ? -value : value);
      }
      std::vector<uint16_t> out(values.size());
      kernels->finalize(out.data(), values.data(), values.size(), 1);
      for (size_t i = 0; i < values.size(); ++i) {
        uint16_t expected = 0;
        Store(dtype, values[i], reinterpret_cast<std::byte*>(&expected));
        CHECK_EQ(out[i], expected);
      }
    }
  }
}

TEST(NanWinsInMinAndMaxWhicheverSideItIsOn) {
  for (const char* set : kInstructionSets) {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      const ReduceKernels* kernels = FindReduceKernelsFor(set, Dtype::kFloat32, op);
      if (kernels == nullptr) continue;
      const std::vector<float> numbers(37, 1.0F);
      const std::vector<float> nans(37, std::numeric_limits<float>::quiet_NaN());
      for (const bool nan_first : {true, false}) {
        const void* sources[] = {nan_first ? nans.data() : numbers.data(),
                                 nan_first ? numbers.data() : nans.data()};
        std::vector<float> out(37);
        kernels->reduce(out.data(), sources, 2, out.size(), 1);
        CHECK(std::isnan(out[0]) && std::isnan(out[36]));
      }
    }
  }
}

TEST(TypesThatCannotBeReducedHaveNoLoops) {
  CHECK(FindReduceKernels(Dtype::kInt16, ReduceOp::kSum) == nullptr);
  CHECK(FindReduceKernels(Dtype::kBool, ReduceOp::kMax) == nullptr);
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
