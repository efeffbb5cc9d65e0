// Queued operations: order, mixing with synchronous ones, independence of the submitter.
#include <vector>

#include "check.h"
#include "requests.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

TEST(QueuedOperationsRunInOrderOfSubmission) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      // Each allreduce takes up what the one before left: any other order gives other numbers.
      std::vector<float> data(1000, 1.0F);
      std::vector<std::shared_ptr<PendingOperation>> pending;
      float expected = 1.0F;
      for (int i = 0; i < 6; ++i) {
        const auto op = i % 2 == 0 ? ReduceOp::kSum : ReduceOp::kProduct;
        pending.push_back(communicator.Submit(AllReduceOf(data.data(), data.size(), op), kTimeout));
        float combined = expected;
        for (int rank = 1; rank < communicator.world_size(); ++rank) {
          combined = op == ReduceOp::kSum ? combined + expected : combined * expected;
        }
        expected = combined;
      }
      for (const auto& operation : pending) {
        CHECK_OK(Communicator::Wait(*operation, kTimeout, nullptr));
      }
      CHECK_EQ(data.front(), expected);
      CHECK_EQ(data.back(), expected);
    });
  }
}

TEST(SynchronousOperationComesAfterWhatWasQueued) {
  World world({0, 0});
  world.OpenAll();
  world.Run([](Communicator& communicator, int) {
    for (int round = 0; round < 200; ++round) {
      std::vector<float> data(10, 1.0F);
      const auto pending = communicator.Submit(AllReduceOf(data.data(), data.size()), kTimeout);
      CHECK_OK(communicator.Run(AllReduceOf(data.data(), data.size()), kTimeout, nullptr));
      CHECK(pending->done());
      CHECK_EQ(data[9], 4.0F);
    }
  });
}

TEST(ManySmallOperationsLoseNoWakeup) {
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 0, 0, 0, 0}, std::vector{0, 1}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      float value = 0;
      for (int i = 0; i < 500; ++i) {
        value = 1;
        CHECK_OK(communicator.Run(AllReduceOf(&value, 1), kTimeout, nullptr));
        const auto pending = communicator.Submit(AllReduceOf(&value, 1, ReduceOp::kMax), kTimeout);
        CHECK_OK(Communicator::Wait(*pending, kTimeout, nullptr));
      }
      CHECK_EQ(value, static_cast<float>(communicator.world_size()));
    });
  }
}

TEST(WaitThatTimesOutLeavesTheOperationGoingOn) {
  World world({0, 0});
  world.OpenAll();
  float first = 1;
  float second = 1;
  const auto early = world.at(0).Submit(AllReduceOf(&first, 1), kTimeout);
  const Status status = Communicator::Wait(*early, 0.05, nullptr);
  CHECK(status.code() == StatusCode::kTimeout);
  CHECK_CONTAINS(status.ToString(), "it goes on");
  CHECK_OK(world.at(1).Run(AllReduceOf(&second, 1), kTimeout, nullptr));
  CHECK_OK(Communicator::Wait(*early, kTimeout, nullptr));
  CHECK_EQ(first, 2.0F);
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
