// allreduce, reduce_scatter and allgather of several arrays as one operation.
#include <algorithm>
#include <vector>

#include "check.h"
#include "trial.h"

namespace sparkdl::tests {
namespace {

TEST(GroupsAreRightForEveryDtypeAndReduction) {
  OnEveryTopology([](Communicator& communicator, const Trials& trials) {
    for (const Dtype dtype : kDtypes) {
      for (const ReduceOp op : kReduceOps) {
        if (!CanReduce(dtype, op)) continue;
        RunTrial(communicator, trials.AllReduceGroup({dtype, op}, {33, 0, 1, 1031, 0}));
        RunTrial(communicator,
                 trials.AllReduceGroup({dtype, op, {.before = 0.5, .after = 0.75}}, {7, 129}));
      }
    }
  });
}

TEST(GroupsMayBeSmallOrEmptyOrLongerThanATile) {
  OnEveryTopology([](Communicator& communicator, const Trials& trials) {
    RunTrial(communicator, trials.AllReduceGroup({}, {0}));
    RunTrial(communicator, trials.AllReduceGroup({}, {0, 0, 0}));
    RunTrial(communicator, trials.AllReduceGroup({}, {1}));
    RunTrial(communicator, trials.AllReduceGroup({}, {200'003, 1, 200'003}));
    RunTrial(communicator, trials.AllReduceGroup({Dtype::kBfloat16}, {5, 300'001}));
    RunTrial(communicator, trials.AllReduceGroup({}, std::vector<size_t>(300, 17)));
  });
}

// Arrays whose blocks are equal, different or empty; some longer than a tile.
std::vector<std::vector<Counts>> BlocksOfSeveral(int world_size) {
  const auto ranks = static_cast<size_t>(world_size);
  Counts falling = UnevenCounts(world_size, 500);
  std::ranges::reverse(falling);
  return {{Counts(ranks, 33), Counts(ranks, 0), Counts(ranks, 1031)},
          {UnevenCounts(world_size, 700), Counts(ranks, 5), UnevenCounts(world_size, 3)},
          // All ranks have the same total, but not of each array.
          {UnevenCounts(world_size, 500), falling},
          {Counts(ranks, 0)},
          {Counts(ranks, 200'003), UnevenCounts(world_size, 90'001), Counts(ranks, 1)},
          std::vector<Counts>(300, Counts(ranks, 17))};
}

TEST(GroupsOfBlocksAreReducedAndScattered) {
  OnEveryTopology([](Communicator& communicator, const Trials& trials) {
    for (const auto& counts : BlocksOfSeveral(communicator.world_size())) {
      for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kInt8}) {
        RunTrial(communicator, trials.ReduceScatterGroup({dtype, ReduceOp::kSum}, counts));
        RunTrial(communicator, trials.ReduceScatterGroup(
                                   {dtype, ReduceOp::kAvg, {.before = 0.5, .after = 4}}, counts));
      }
    }
  });
}

TEST(GroupsOfBlocksAreGathered) {
  OnEveryTopology([](Communicator& communicator, const Trials& trials) {
    for (const auto& counts : BlocksOfSeveral(communicator.world_size())) {
      for (const Dtype dtype : {Dtype::kUint8, Dtype::kFloat64}) {
        RunTrial(communicator, trials.AllGatherGroup(dtype, counts));
      }
    }
  });
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
