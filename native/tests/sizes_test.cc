// Sizes and addresses at boundaries: tiles, slices, chunks, odd addresses, many ranks.
#include "check.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

constexpr size_t kSlot = Segment::kSlotBytes;

TEST(SizesAroundTilesAndSlicesAreRight) {
  constexpr size_t kTileFloats = kSlot / sizeof(float);
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 0, 0}, std::vector{0, 0, 0, 1},
                            std::vector{0, 1, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      const Trials trials(communicator);
      for (const size_t count :
           {size_t{4096}, size_t{4097}, kTileFloats / 4 - 1, kTileFloats / 4, kTileFloats / 4 + 1,
            kTileFloats / 2 + 1, kTileFloats - 1, kTileFloats, kTileFloats + 1}) {
        RunTrial(communicator, trials.AllReduce({}, count));
        RunTrial(communicator, trials.Reduce({}, count, 1));
      }
      RunTrial(communicator, trials.AllReduce({Dtype::kBfloat16}, 4 * kTileFloats + 33));
      RunTrial(communicator,
               trials.ReduceScatter({Dtype::kBfloat16, ReduceOp::kAvg}, kTileFloats + 1));
    });
  }
}

TEST(StreamsLongerThanASlotAreRight) {
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 0, 0}, std::vector{0, 1, 1, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      const Trials trials(communicator);
      const int last = communicator.world_size() - 1;
      for (const size_t count : {kSlot, 2 * kSlot, 2 * kSlot + 1, 5 * kSlot - 1}) {
        RunTrial(communicator, trials.AllGather(Dtype::kUint8, count));
        RunTrial(communicator, trials.Broadcast(Dtype::kUint8, count, last));
        RunTrial(communicator, trials.Gather(Dtype::kUint8, count, last));
        RunTrial(communicator, trials.Scatter(Dtype::kUint8, count, last));
        RunTrial(communicator, trials.AllToAll(Dtype::kUint8, count));
        // All ranks take as many turns as the longest stream needs.
        RunTrial(communicator, trials.AllToAll(Dtype::kUint8, [&](int from, int to) {
          return from == 0 && to == last ? count : size_t{1};
        }));
      }
    });
  }
}

// More than the 16 MiB of accumulators that a lane takes at a time.
TEST(LargeBuffersAcrossHostsAreTakenInChunks) {
  for (const auto& hosts : {std::vector{0, 1}, std::vector{0, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      const Trials trials(communicator);
      const size_t count = size_t{9} * 1024 * 1024 / 2 + 5;
      RunTrial(communicator, trials.AllReduce({Dtype::kBfloat16}, count));
      RunTrial(communicator, trials.Reduce({Dtype::kInt8, ReduceOp::kAvg}, count, 0));
      RunTrial(communicator, trials.ReduceScatter({}, count / 2));
      RunTrial(communicator,
               trials.ReduceScatter({}, 0, UnevenCounts(communicator.world_size(), count / 2)));
    });
  }
}

TEST(UnalignedBuffersAreRight) {
  World world({0, 0, 1, 1});
  world.OpenAll();
  world.Run([](Communicator& communicator, int) {
    for (const Dtype dtype : kDtypes) {
      // The second array of the group lies at an odd address.
      RunTrial(communicator, Trials(communicator).AllReduceGroup({dtype}, {1, 10'007}));
    }
  });
}

void RunOneOfEach(Communicator& communicator, size_t count) {
  const Trials trials(communicator);
  const int root = communicator.world_size() - 1;
  const Counts uneven = UnevenCounts(communicator.world_size(), count);
  RunTrial(communicator, trials.AllReduce({Dtype::kFloat16}, count));
  RunTrial(communicator, trials.AllReduceGroup({}, {count, 0, 5}));
  RunTrial(communicator, trials.Reduce({Dtype::kInt32}, count, root));
  RunTrial(communicator, trials.ReduceScatter({}, 0, uneven));
  RunTrial(communicator, trials.AllGather(Dtype::kFloat32, 0, uneven));
  RunTrial(communicator, trials.Gather(Dtype::kInt64, count, root));
  RunTrial(communicator, trials.Scatter(Dtype::kInt16, 0, root, uneven));
  RunTrial(communicator, trials.AllToAll(Dtype::kFloat32, count));
  RunTrial(communicator, trials.Broadcast(Dtype::kUint8, count, root));
}

TEST(RanksThatMapTheSegmentAtDifferentAddressesAgree) {
  for (const auto& hosts : {std::vector{0, 0, 0}, std::vector{0, 0, 1, 0}}) {
    World world(hosts, 30.0, Mapping::kOwn);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      for (const size_t count : {7, 100'003}) RunOneOfEach(communicator, count);
    });
  }
}

TEST(MoreRanksThanCoresWork) {
  World world(std::vector<int>(9, 0));
  world.OpenAll();
  world.Run([](Communicator& communicator, int) {
    for (int i = 0; i < 50; ++i) RunTrial(communicator, Trials(communicator).AllReduce({}, 100));
    RunOneOfEach(communicator, 20'001);
  });
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
