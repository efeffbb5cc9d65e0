// Every operation against a plain reference, on every topology.
#include <algorithm>
#include <string>

#include "check.h"
#include "reference.h"
#include "requests.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

void CheckSame(const std::byte* got, const Bytes& expected, const std::string& what) {
  if (std::equal(expected.begin(), expected.end(), got)) return;
  const auto differs = std::mismatch(expected.begin(), expected.end(), got);
  ReportFailure(__FILE__, __LINE__,
                what + " differs at byte " + std::to_string(differs.first - expected.begin()));
}

void CheckAllReduce(Communicator& communicator, Dtype dtype, ReduceOp op, size_t count) {
  Bytes data = Elements(dtype, communicator.rank(), 0, count);
  CHECK_OK(communicator.Run(AllReduceOf(data.data(), count, dtype, op), kTimeout, nullptr));
  CheckSame(data.data(), Reduced(dtype, op, communicator.world_size(), 0, count),
            "allreduce of " + std::to_string(count) + " " + std::string(NameOf(dtype)) + " by " +
                std::string(NameOf(op)));
}

void CheckReduceScatter(Communicator& communicator, Dtype dtype, ReduceOp op, size_t count) {
  const auto world_size = static_cast<size_t>(communicator.world_size());
  const auto rank = static_cast<size_t>(communicator.rank());
  const Bytes whole = Elements(dtype, communicator.rank(), 0, count * world_size);
  Bytes out(count * BytesOf(dtype));
  CHECK_OK(communicator.Run(ReduceScatterOf(whole.data(), out.data(), count, dtype, op), kTimeout,
                            nullptr));
  CheckSame(out.data(), Reduced(dtype, op, communicator.world_size(), rank * count, count),
            "reduce_scatter of " + std::to_string(count) + " " + std::string(NameOf(dtype)) +
                " by " + std::string(NameOf(op)));
  CHECK(whole == Elements(dtype, communicator.rank(), 0, whole.size() / BytesOf(dtype)));
}

void CheckAllGather(Communicator& communicator, Dtype dtype, size_t count) {
  const auto world_size = static_cast<size_t>(communicator.world_size());
  const size_t bytes = count * BytesOf(dtype);
  const Bytes mine = Elements(dtype, communicator.rank(), 0, count);
  Bytes expected;
  for (int rank = 0; rank < communicator.world_size(); ++rank) {
    const Bytes block = Elements(dtype, rank, 0, count);
    expected.insert(expected.end(), block.begin(), block.end());
  }
  Bytes out(bytes * world_size);
  CHECK_OK(communicator.Run(AllGatherOf(mine.data(), out.data(), count, dtype), kTimeout, nullptr));
  CheckSame(out.data(), expected, "allgather of " + std::to_string(count));

  Bytes in_place(bytes * world_size);
  std::byte* const block = in_place.data() + bytes * static_cast<size_t>(communicator.rank());
  std::ranges::copy(mine, block);
  CHECK_OK(communicator.Run(AllGatherOf(block, in_place.data(), count, dtype), kTimeout, nullptr));
  CheckSame(in_place.data(), expected, "allgather in place of " + std::to_string(count));
}

void CheckBroadcast(Communicator& communicator, Dtype dtype, size_t count) {
  for (int root = 0; root < communicator.world_size(); ++root) {
    Bytes data = Elements(dtype, communicator.rank(), 0, count);
    CHECK_OK(communicator.Run(BroadcastOf(data.data(), count, dtype, root), kTimeout, nullptr));
    CheckSame(data.data(), Elements(dtype, root, 0, count),
              "broadcast of " + std::to_string(count) + " from " + std::to_string(root));
  }
}

void CheckEverything(Communicator& communicator, Dtype dtype, size_t count) {
  for (const ReduceOp op : kReduceOps) {
    CheckAllReduce(communicator, dtype, op, count);
    CheckReduceScatter(communicator, dtype, op, count);
  }
  CheckAllGather(communicator, dtype, count);
  CheckBroadcast(communicator, dtype, count);
  CHECK_OK(communicator.Run(BarrierRequest(), kTimeout, nullptr));
}

TEST(EveryOperationIsRightForEveryDtypeAndReduction) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      for (const Dtype dtype : kReducible) {
        for (const size_t count : {0, 1, 2, 7, 1031}) CheckEverything(communicator, dtype, count);
      }
    });
  }
}

TEST(SizesAroundTilesAndSlicesAreRight) {
  constexpr size_t kTileFloats = Segment::kSlotBytes / sizeof(float);
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 0, 0}, std::vector{0, 0, 0, 1},
                            std::vector{0, 1, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      for (const size_t count :
           {size_t{4096}, size_t{4097}, kTileFloats - 1, kTileFloats, kTileFloats + 1}) {
        CheckAllReduce(communicator, Dtype::kFloat32, ReduceOp::kSum, count);
      }
      CheckAllReduce(communicator, Dtype::kBfloat16, ReduceOp::kSum, 4 * kTileFloats + 33);
      CheckReduceScatter(communicator, Dtype::kBfloat16, ReduceOp::kAvg, kTileFloats + 1);
      CheckAllGather(communicator, Dtype::kUint8, Segment::kSlotBytes + 1);
      CheckBroadcast(communicator, Dtype::kUint8, Segment::kSlotBytes + 1);
    });
  }
}

// Above the 16 MiB of accumulators that a lane takes at a time.
TEST(LargeBuffersAcrossHostsAreTakenInChunks) {
  for (const auto& hosts : {std::vector{0, 1}, std::vector{0, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      const size_t count = size_t{9} * 1024 * 1024 / 2 + 5;
      CheckAllReduce(communicator, Dtype::kBfloat16, ReduceOp::kSum, count);
      CheckReduceScatter(communicator, Dtype::kFloat32, ReduceOp::kSum, count / 2);
    });
  }
}

TEST(UnalignedBuffersAreRight) {
  World world({0, 0, 1, 1});
  world.OpenAll();
  world.Run([](Communicator& communicator, int rank) {
    for (const Dtype dtype : kReducible) {
      constexpr size_t kCount = 10'007;
      const Bytes elements = Elements(dtype, rank, 0, kCount);
      Bytes shifted(1);
      shifted.insert(shifted.end(), elements.begin(), elements.end());
      CHECK_OK(communicator.Run(AllReduceOf(shifted.data() + 1, kCount, dtype), kTimeout, nullptr));
      CheckSame(shifted.data() + 1,
                Reduced(dtype, ReduceOp::kSum, communicator.world_size(), 0, kCount), "unaligned");
    }
  });
}

TEST(ReduceScatterMayWriteIntoItsOwnBlock) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int rank) {
      constexpr size_t kCount = 70'001;
      const auto world_size = static_cast<size_t>(communicator.world_size());
      Bytes whole = Elements(Dtype::kFloat32, rank, 0, kCount * world_size);
      std::byte* const block = whole.data() + static_cast<size_t>(rank) * kCount * sizeof(float);
      CHECK_OK(communicator.Run(ReduceScatterOf(whole.data(), block, kCount, Dtype::kFloat32),
                                kTimeout, nullptr));
      CheckSame(block,
                Reduced(Dtype::kFloat32, ReduceOp::kSum, communicator.world_size(),
                        static_cast<size_t>(rank) * kCount, kCount),
                "reduce_scatter in place");
    });
  }
}

TEST(RanksThatMapTheSegmentAtDifferentAddressesAgree) {
  World world({0, 0, 0}, 30.0, Mapping::kOwn);
  world.OpenAll();
  world.Run([](Communicator& communicator, int) {
    for (const size_t count : {7, 100'003}) {
      CheckEverything(communicator, Dtype::kFloat32, count);
    }
  });
}

TEST(MoreRanksThanCoresWork) {
  World world(std::vector<int>(9, 0));
  world.OpenAll();
  world.Run([](Communicator& communicator, int) {
    for (int i = 0; i < 50; ++i) {
      CheckAllReduce(communicator, Dtype::kFloat32, ReduceOp::kSum, 100);
    }
    CheckEverything(communicator, Dtype::kFloat16, 20'001);
  });
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
