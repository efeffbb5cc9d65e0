// allreduce, reduce and reduce_scatter against a plain reference, on every topology.
#include "check.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

void RunReductions(Communicator& communicator, const Trials::Numbers& numbers, size_t count) {
  const Trials trials(communicator);
  const int world_size = communicator.world_size();
  RunTrial(communicator, trials.AllReduce(numbers, count));
  RunTrial(communicator, trials.Reduce(numbers, count, static_cast<int>(count) % world_size));
  RunTrial(communicator, trials.ReduceScatter(numbers, count));
  RunTrial(communicator, trials.ReduceScatter(numbers, 0, UnevenCounts(world_size, count)));
}

TEST(EveryReductionIsRightForEveryDtypeOnEveryTopology) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      for (const Dtype dtype : kDtypes) {
        for (const ReduceOp op : kReduceOps) {
          if (!CanReduce(dtype, op)) continue;
          for (const size_t count : {0, 1, 33, 1031}) {
            RunReductions(communicator, {dtype, op}, count);
          }
        }
      }
    });
  }
}

TEST(ScalesMultiplyInputsAndOutputs) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      for (const Dtype dtype : kDtypes) {
        for (const ReduceOp op : kReduceOps) {
          if (!CanReduce(dtype, op)) continue;
          RunReductions(communicator, {dtype, op, {.before = 0.5, .after = 1.0}}, 131);
          RunReductions(communicator, {dtype, op, {.before = 1.0, .after = 0.75}}, 132);
        }
        RunReductions(communicator, {dtype, ReduceOp::kSum, {.before = 2.0, .after = 0.3}}, 20'001);
      }
    });
  }
}

TEST(ReduceIsRightForEveryRoot) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      for (int root = 0; root < communicator.world_size(); ++root) {
        for (const size_t count : {3, 50'003}) {
          RunTrial(communicator, Trials(communicator).Reduce({Dtype::kBfloat16}, count, root));
        }
      }
    });
  }
}

TEST(ReduceScatterMayWriteIntoItsOwnBlock) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      const Trials trials(communicator);
      const Counts uneven = UnevenCounts(communicator.world_size(), 70'001);
      RunTrial(communicator, trials.ReduceScatter({}, 70'001, {}, Place::kInside));
      RunTrial(communicator, trials.ReduceScatter({}, 0, uneven, Place::kInside));
      RunTrial(communicator, trials.ReduceScatter({.scales = {.before = 0.5, .after = 1.0}}, 0,
                                                  uneven, Place::kInside));
    });
  }
}

TEST(BoolsHaveNoAverage) {
  World world({0});
  const Communicator& communicator = world.Open(0);
  std::byte value{};
  const Status status = communicator.Validate(AllReduceOf(&value, 1, Dtype::kBool, ReduceOp::kAvg));
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK_CONTAINS(status.ToString(), "bools have no average");
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
