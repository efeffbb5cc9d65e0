// allreduce of several arrays as one operation.
#include "check.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

TEST(GroupsAreRightForEveryDtypeAndReduction) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      const Trials trials(communicator);
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
}

TEST(GroupsMayBeSmallOrEmptyOrLongerThanATile) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      const Trials trials(communicator);
      RunTrial(communicator, trials.AllReduceGroup({}, {0}));
      RunTrial(communicator, trials.AllReduceGroup({}, {0, 0, 0}));
      RunTrial(communicator, trials.AllReduceGroup({}, {1}));
      RunTrial(communicator, trials.AllReduceGroup({}, {200'003, 1, 200'003}));
      RunTrial(communicator, trials.AllReduceGroup({Dtype::kBfloat16}, {5, 300'001}));
      RunTrial(communicator, trials.AllReduceGroup({}, std::vector<size_t>(300, 17)));
    });
  }
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
