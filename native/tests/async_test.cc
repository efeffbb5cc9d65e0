// Queued operations: order, mixing with synchronous ones, independence of the submitter.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

TEST(QueuedOperationsRunInOrderOfSubmission) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      // Each allreduce uses the result of the one before, so any other order gives other numbers.
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

TEST(SynchronousOperationRunsAfterQueuedOnes) {
  World world({0, 0});
  world.OpenAll();
  world.Run([](Communicator& communicator, int) {
    for (int round = 0; round < 200; ++round) {
      std::vector<float> data(10, 1.0F);
      const auto pending = communicator.Submit(AllReduceOf(data.data(), data.size()), kTimeout);
      CHECK_OK(communicator.Run(AllReduceOf(data.data(), data.size()), kTimeout, nullptr));
      CHECK_EQ(data[9], 4.0F);
      // The progress thread may not have marked it as done yet.
      CHECK_OK(Communicator::Wait(*pending, kTimeout, nullptr));
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

TEST(OperationContinuesAfterAWaitTimedOut) {
  World world({0, 0});
  world.OpenAll();
  float first = 1;
  float second = 1;
  const auto early = world.at(0).Submit(AllReduceOf(&first, 1), kTimeout);
  const Status status = Communicator::Wait(*early, 0.05, nullptr);
  CHECK(status.code() == StatusCode::kTimeout);
  CHECK_CONTAINS(status.ToString(), "it continues");
  CHECK_OK(world.at(1).Run(AllReduceOf(&second, 1), kTimeout, nullptr));
  CHECK_OK(Communicator::Wait(*early, kTimeout, nullptr));
  CHECK_EQ(first, 2.0F);
}

TEST(WaiterIsWokenWhileLaterOperationsWaitForOtherRanks) {
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 1}, std::vector{0, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    std::atomic<int> num_woken{0};
    world.Run([&](Communicator& communicator, int rank) {
      std::vector<float> data(10, 1.0F);
      const auto submit = [&] {
        return communicator.Submit(AllReduceOf(data.data(), data.size()), kTimeout);
      };
      const auto first = submit();
      // Rank 1 joins the second operation only when the others have finished waiting for the first.
      const auto begin = Clock::now();
      while (rank == 1 && num_woken < world.size() - 1 &&
             Clock::now() - begin < std::chrono::seconds(20)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const auto second = submit();
      while (!first->done()) first->WaitFor(std::chrono::seconds(20));
      ++num_woken;
      // A thread that is not woken sleeps for the whole time that it asked for.
      CHECK(Clock::now() - begin < std::chrono::seconds(10));
      CHECK_OK(Communicator::Wait(*second, kTimeout, nullptr));
    });
  }
}

TEST(MismatchOfQueuedOperationsDoesNotAffectOthers) {
  for (const auto& hosts : {std::vector{0, 0, 0}, std::vector{0, 1, 1, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int rank) {
      const Trials trials(communicator);
      std::vector<Trial> queued;
      std::vector<std::shared_ptr<PendingOperation>> pending;
      for (int i = 0; i < 30; ++i) {
        queued.push_back(trials.AllReduce({}, i % 3 == 1 && rank == 1 ? 3 : 10'000));
        pending.push_back(communicator.Submit(queued.back().operation, kTimeout));
      }
      for (size_t i = 0; i < pending.size(); ++i) {
        const Status status = Communicator::Wait(*pending[i], kTimeout, nullptr);
        if (i % 3 != 1) {
          queued[i].Check(status);
          continue;
        }
        CHECK(status.code() == StatusCode::kMismatch);
        CHECK_CONTAINS(status.ToString(), "about operation " + std::to_string(i) + ": ");
        CHECK(queued[i].output == Elements(Dtype::kFloat32, rank, 0, rank == 1 ? 3 : 10'000));
      }
    });
  }
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
