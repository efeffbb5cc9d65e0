// The same bits on every rank and in every repetition; one rounding for the narrow types.
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <bit>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "requests.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

std::vector<float> RandomFloats(int rank, size_t count) {
  std::mt19937 generator(static_cast<unsigned>(rank) + 1);
  std::uniform_real_distribution<float> distribution(-1.0F, 1.0F);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(generator);
  return values;
}

TEST(AllReduceGivesTheSameBitsOnAllRanksAndEachTime) {
  constexpr size_t kCount = 300'003;
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    std::vector<std::vector<float>> results(hosts.size());
    world.Run([&](Communicator& communicator, int rank) {
      for (int repetition = 0; repetition < 3; ++repetition) {
        std::vector<float> values = RandomFloats(rank, kCount);
        CHECK_OK(communicator.Run(AllReduceOf(values.data(), kCount), kTimeout, nullptr));
        if (repetition > 0) CHECK(values == results[rank]);
        results[rank] = values;
      }
    });
    for (const auto& result : results) CHECK(result == results[0]);
  }
}

#if defined(__SSE__)
constexpr uint64_t kFlushToZero = 0x8040;
uint64_t FloatControl() { return _mm_getcsr(); }
void SetFloatControl(uint64_t word) { _mm_setcsr(static_cast<unsigned>(word)); }
#elif defined(__aarch64__)
constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
uint64_t FloatControl() {
  uint64_t word = 0;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
void SetFloatControl(uint64_t word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#endif

// Flushes subnormal numbers as torch.set_flush_denormal(True) does, on one rank, and only on its
// caller's threads.
TEST(SubnormalSumsDoNotDependOnTheModeOfTheThread) {
  constexpr float kSubnormal = 1e-40F;
  World world({0, 0});
  world.OpenAll();
  world.Run([&](Communicator& communicator, int rank) {
    if (rank == 1) SetFloatControl(FloatControl() | kFlushToZero);
    for (const size_t count : {size_t{1}, size_t{100'003}}) {
      std::vector<float> values(count, kSubnormal);
      CHECK_OK(communicator.Run(AllReduceOf(values.data(), count), kTimeout, nullptr));
      // Compared by their bits, because this thread treats them as zero.
      for (const float value : values) {
        CHECK_EQ(std::bit_cast<uint32_t>(value), 2 * std::bit_cast<uint32_t>(kSubnormal));
      }
    }
    CHECK_EQ(FloatControl() & kFlushToZero, rank == 1 ? kFlushToZero : 0U);
  });
}

// Sums in another order would differ in their last bits.
TEST(EveryReductionGivesTheSameBitsEachTime) {
  constexpr size_t kCount = 60'013;
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([&](Communicator& communicator, int rank) {
      const auto world_size = static_cast<size_t>(communicator.world_size());
      std::vector<float> first;
      for (int repetition = 0; repetition < 3; ++repetition) {
        std::vector<float> values = RandomFloats(rank, kCount * world_size);
        std::vector<float> out(kCount);
        auto* const data = reinterpret_cast<std::byte*>(values.data());
        auto* const block = reinterpret_cast<std::byte*>(out.data());
        CHECK_OK(
            communicator.Run(Between(OpKind::kReduceScatter, data, block, kCount, Dtype::kFloat32),
                             kTimeout, nullptr));
        CHECK_OK(communicator.Run(
            Rooted(InPlace(OpKind::kReduce, data, values.size(), Dtype::kFloat32), 0), kTimeout,
            nullptr));
        Operation group = AllReduceOf(nullptr, kCount, Dtype::kFloat32);
        group.group = {{block, 4 * size_t{13}}, {block + 4 * size_t{13}, 4 * (kCount - 13)}};
        CHECK_OK(communicator.Run(group, kTimeout, nullptr));
        out.insert(out.end(), values.begin(), values.end());
        if (repetition > 0) CHECK(out == first);
        first = std::move(out);
      }
    });
  }
}

uint16_t Bfloat16(float exact) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(exact) >> 16);
}

// 256 + 1 + 1 + 1: if every addition were rounded, the sum would stay at 256, whose successor is
// 258.
TEST(Bfloat16AccumulatesInFloat32EndToEnd) {
  for (const auto& hosts : {std::vector{0, 0, 0, 0}, std::vector{0, 1, 2, 3},
                            std::vector{0, 0, 1, 1}, std::vector{0, 1, 0, 1}}) {
    for (const size_t count : {5, 100'001}) {
      World world(hosts);
      world.OpenAll();
      world.Run([&](Communicator& communicator, int rank) {
        std::vector<uint16_t> values(count, Bfloat16(rank == 0 ? 256.0F : 1.0F));
        auto* bytes = reinterpret_cast<std::byte*>(values.data());
        CHECK_OK(communicator.Run(AllReduceOf(bytes, count, Dtype::kBfloat16), kTimeout, nullptr));
        CHECK_EQ(values.front(), Bfloat16(260.0F));  // 259, rounded once, to even
        CHECK_EQ(values.back(), Bfloat16(260.0F));
      });
    }
  }
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
