// broadcast, allgather, gather, scatter, alltoall and barrier against a plain reference, on every
// topology.
#include <atomic>

#include "check.h"
#include "trial.h"

namespace sparkdl::tests {
namespace {

// One dtype of each size.
constexpr Dtype kWidths[] = {Dtype::kInt8, Dtype::kFloat16, Dtype::kUint32, Dtype::kFloat64};
constexpr size_t kCounts[] = {0, 1, 7, 1031, 40'009};

TEST(BroadcastIsRightFromEveryRoot) {
  OnEveryTopology([](Communicator& communicator, const Trials& trials) {
    for (int root = 0; root < communicator.world_size(); ++root) {
      for (const Dtype dtype : kWidths) {
        for (const size_t count : kCounts) {
          RunTrial(communicator, trials.Broadcast(dtype, count, root));
        }
      }
    }
  });
}

TEST(AllGatherIsRightForEvenAndUnevenBlocks) {
  OnEveryTopology([](Communicator& communicator, const Trials& trials) {
    for (const Dtype dtype : kWidths) {
      for (const size_t count : kCounts) {
        const Counts uneven = UnevenCounts(communicator.world_size(), count);
        for (const Place place : {Place::kApart, Place::kInside}) {
          RunTrial(communicator, trials.AllGather(dtype, count, {}, place));
          RunTrial(communicator, trials.AllGather(dtype, 0, uneven, place));
        }
      }
    }
  });
}

TEST(GatherAndScatterAreRightForEveryRootAndUnevenBlocks) {
  OnEveryTopology([](Communicator& communicator, const Trials& trials) {
    for (int root = 0; root < communicator.world_size(); ++root) {
      for (const Dtype dtype : {Dtype::kInt8, Dtype::kFloat64}) {
        for (const size_t count : kCounts) {
          const Counts uneven = UnevenCounts(communicator.world_size(), count);
          RunTrial(communicator, trials.Gather(dtype, count, root));
          RunTrial(communicator, trials.Gather(dtype, 0, root, uneven));
          RunTrial(communicator, trials.Scatter(dtype, count, root));
          RunTrial(communicator, trials.Scatter(dtype, 0, root, uneven));
        }
      }
    }
  });
}

TEST(AllToAllIsRightForEvenAndUnevenBlocks) {
  OnEveryTopology([](Communicator& communicator, const Trials& trials) {
    for (const Dtype dtype : kWidths) {
      for (const size_t count : kCounts) {
        RunTrial(communicator, trials.AllToAll(dtype, count));
        RunTrial(communicator, trials.AllToAll(dtype, [&](int from, int to) {
          return count * static_cast<size_t>((3 * from + 5 * to) % 4) / 3;
        }));
      }
    }
  });
}

TEST(AllToAllMaySendEverythingToOneRankOrNothingAtAll) {
  OnEveryTopology([](Communicator& communicator, const Trials& trials) {
    const int last = communicator.world_size() - 1;
    const auto to_last = [&](int, int to) { return to == last ? size_t{300'001} : size_t{0}; };
    RunTrial(communicator, trials.AllToAll(Dtype::kUint8, to_last));
    RunTrial(communicator, trials.AllToAll(Dtype::kUint8, [](int, int) { return size_t{0}; }));
    RunTrial(communicator, trials.AllToAll(Dtype::kUint8, [](int from, int to) {
      return from == to ? size_t{1000} : size_t{0};
    }));
  });
}

TEST(BarrierWaitsForEveryRank) {
  OnEveryTopology([](Communicator& communicator, const Trials&) {
    static std::atomic<int> num_arrived;
    static std::atomic<int> num_done;
    for (int round = 0; round < 20; ++round) {
      ++num_arrived;
      CHECK_OK(communicator.Run(BarrierRequest(), kTimeout, nullptr));
      CHECK_EQ(num_arrived.load(), communicator.world_size());
      ++num_done;
      CHECK_OK(communicator.Run(BarrierRequest(), kTimeout, nullptr));
      if (communicator.rank() == 0) {
        CHECK_EQ(num_done.exchange(0), communicator.world_size());
        num_arrived = 0;
      }
      CHECK_OK(communicator.Run(BarrierRequest(), kTimeout, nullptr));
    }
  });
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
