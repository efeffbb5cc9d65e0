// Ranks that call different operations: all get the same text, which says what each rank called;
// nothing is written, and the communicator continues.
#include <string>
#include <vector>

#include "check.h"
#include "disagreement.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

std::vector<std::vector<int>> TopologiesOfSeveral() {
  auto topologies = Topologies();
  std::erase_if(topologies, [](const auto& hosts) { return hosts.size() == 1; });
  return topologies;
}

TEST(AllRanksLearnWhatEachSaidAndContinue) {
  for (const auto& hosts : TopologiesOfSeveral()) {
    World world(hosts);
    world.OpenAll();
    const int last = world.size() - 1;
    const std::string who = "rank " + std::to_string(last);
    const std::string text = Disagree(
        world, last, [](Saying& saying) { return saying.Of(OpKind::kAllReduce, 200'000); },
        [](Saying& saying) { return saying.Of(OpKind::kAllReduce, 11); });
    CHECK_CONTAINS(text, "the ranks disagree about operation 0: rank");
    CHECK_CONTAINS(text, " said allreduce of 200000 float32 by sum; ");
    CHECK_CONTAINS(text, who + " said allreduce of 11 float32 by sum");
  }
}

TEST(AllToAllCountsThatDoNotMatchAreNamed) {
  for (const auto& hosts : TopologiesOfSeveral()) {
    World world(hosts);
    world.OpenAll();
    const auto world_size = static_cast<size_t>(world.size());
    CHECK_EQ(Disagree(world,
                      [&](Saying& saying, int rank) {
                        Operation operation = saying.Of(OpKind::kAllToAll, 0);
                        operation.counts.assign(world_size, 2);
                        operation.receive_counts.assign(world_size, 2);
                        if (rank == 1) operation.counts[0] = 3;
                        return operation;
                      }),
             "the ranks disagree about alltoall: rank 1 sends 3 elements to rank 0, which expects "
             "2");
  }
}

// Operations of various lengths run before and after, so that anything written by a mismatch would
// show.
TEST(ManyMismatchesInARowLeaveNoTrace) {
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 0, 0}, std::vector{0, 1, 1, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int rank) {
      const Trials trials(communicator);
      for (int round = 0; round < 60; ++round) {
        if (round % 3 == 0)
          RunTrial(communicator, trials.AllReduce({}, round % 2 == 0 ? 9 : 40'000));
        Saying saying;
        const size_t count = static_cast<size_t>(1 + round * 1477) * (rank == round % 2 ? 1 : 2);
        const Status status =
            communicator.Run(saying.Of(OpKind::kBroadcast, count), kTimeout, nullptr);
        CHECK(status.code() == StatusCode::kMismatch);
        CHECK(saying.is_untouched());
        if (round % 3 == 1) RunTrial(communicator, trials.AllGather(Dtype::kUint8, 100'000));
      }
    });
  }
}

// Kinds of operations take different numbers of slots, and the ranks must continue with the same
// ones.
TEST(MismatchOfKindsLeavesNoTraceInAnySlot) {
  World world({0, 0});
  world.OpenAll();
  world.Run([](Communicator& communicator, int rank) {
    const Trials trials(communicator);
    for (int round = 0; round < 40; ++round) {
      for (int tile = 0; tile < round % 3; ++tile) RunTrial(communicator, trials.AllReduce({}, 9));
      Saying saying;
      const bool reduces = rank == round % 2;
      const Operation operation =
          saying.Of(reduces ? OpKind::kAllReduce : OpKind::kBroadcast, 1000);
      CHECK(communicator.Run(operation, kTimeout, nullptr).code() == StatusCode::kMismatch);
      RunTrial(communicator, trials.AllReduce({}, 400'000));
    }
  });
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
