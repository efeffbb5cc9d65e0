// Aborts, deaths, departures and invalid data: each is a named error on every rank, in time.
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "puppet.h"
#include "requests.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Ranks with an odd number wait in a queued operation, the others in a synchronous one.
Status RunSomehow(Communicator& communicator, const Operation& operation) {
  if (communicator.rank() % 2 == 0) return communicator.Run(operation, kTimeout, nullptr);
  const auto pending = communicator.Submit(operation, kTimeout);
  return Communicator::Wait(*pending, kTimeout, nullptr);
}

Status AllReduceSomehow(Communicator& communicator, size_t count = 1024) {
  std::vector<float> data(count);
  return RunSomehow(communicator, AllReduceOf(data.data(), data.size()));
}

Status AllToAllSomehow(Communicator& communicator, size_t count) {
  const size_t bytes = count * static_cast<size_t>(communicator.world_size());
  std::vector<std::byte> input(bytes);
  std::vector<std::byte> output(bytes);
  return RunSomehow(communicator,
                    Between(OpKind::kAllToAll, input.data(), output.data(), count, Dtype::kUint8));
}

TEST(AbortEndsBlockedOperationsOnAllRanksWithItsReason) {
  for (const auto& hosts : Topologies()) {
    if (hosts.size() == 1) continue;
    World world(hosts);
    world.OpenAll();
    const auto begin = Clock::now();
    const int aborter = world.size() - 1;
    world.Run([&](Communicator& communicator, int rank) {
      if (rank == aborter) communicator.Abort("out of patience");
      const Status status = AllReduceSomehow(communicator, 100'000);
      CHECK(status.code() == StatusCode::kAborted);
      CHECK_EQ(status.ToString(), "rank " + std::to_string(aborter) + " aborted: out of patience");
    });
    CHECK(SecondsSince(begin) < 2);
  }
}

TEST(DeathOfARankIsNamedOnAllOthersWithinTwoSeconds) {
  for (const auto& hosts : Topologies()) {
    if (hosts.size() == 1) continue;
    World world(hosts);
    for (int rank = 0; rank < world.size(); ++rank) {
      if (rank != 1) world.Open(rank);
    }
    const auto begin = Clock::now();
    std::thread death([&] { world.Kill(1); });
    world.Run([](Communicator& communicator, int rank) {
      int last = -1;
      const Status status = rank == 0 ? AllToAllSomehow(communicator, 100'000)
                                      : communicator.Join(kTimeout, nullptr, last);
      CHECK(status.code() == StatusCode::kRankLost);
      CHECK_CONTAINS(status.ToString(), "rank 1 was lost");
    });
    death.join();
    CHECK(SecondsSince(begin) < 2);
  }
}

// Kinds of operations in which rank 0 waits for rank 1 repeatedly.
constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                             OpKind::kReduce,    OpKind::kGather,        OpKind::kScatter,
                             OpKind::kAllToAll};
constexpr size_t kManyBytes = size_t{3} * 1024 * 1024;

// Rank 1 dies in the middle of an operation, when `until_middle` has returned.
void CheckDeathInTheMiddle(World& world, const Operation& operation,
                           const std::function<void(const Puppet&)>& until_middle) {
  Communicator& communicator = world.Open(0);
  std::thread death([&] {
    until_middle(Puppet(world, 1));
    world.Kill(1);
  });
  const Status status = communicator.Run(operation, kTimeout, nullptr);
  death.join();
  CHECK(status.code() == StatusCode::kRankLost);
  CHECK_CONTAINS(status.ToString(), "rank 1 was lost");
}

TEST(DeathInTheMiddleOfAnOperationInsideAHostIsNamed) {
  std::vector<std::byte> memory(4 * kManyBytes);
  for (const OpKind kind : kKinds) {
    World world({0, 0});
    const Operation operation = Rooted(
        Between(kind, memory.data(), memory.data() + 2 * kManyBytes, kManyBytes, Dtype::kUint8), 0);
    CheckDeathInTheMiddle(world, operation, [&](const Puppet& puppet) {
      puppet.Sync(operation, 1);
      puppet.AwaitSync(0, 2);
    });
  }
}

TEST(DeathInTheMiddleOfAnOperationAcrossHostsIsNamed) {
  std::vector<std::byte> memory(4 * kManyBytes);
  for (const OpKind kind : kKinds) {
    World world({0, 1});
    const Operation operation = Rooted(
        Between(kind, memory.data(), memory.data() + 2 * kManyBytes, kManyBytes, Dtype::kUint8), 0);
    CheckDeathInTheMiddle(world, operation, [&](const Puppet& puppet) {
      puppet.SayHello(operation);
      if (kind == OpKind::kScatter) {
        puppet.ReceiveMuch(kManyBytes / 2);
      } else {
        puppet.SendMuch(kManyBytes / 3);
      }
    });
  }
}

TEST(OperationAfterAPeerLeftSaysWhoLeft) {
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 1}, std::vector{0, 0, 0, 0}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      CHECK_OK(communicator.Run(BarrierRequest(), kTimeout, nullptr));
    });
    CHECK_OK(world.at(1).Close(nullptr));
    const auto begin = Clock::now();
    world.Run([](Communicator& communicator, int rank) {
      if (rank == 1) return;
      int last = -1;
      const Status status = rank == 0 ? AllToAllSomehow(communicator, 1000)
                                      : communicator.Join(kTimeout, nullptr, last);
      CHECK(status.code() == StatusCode::kFailed);
      CHECK_CONTAINS(status.ToString(), "rank 1 closed the communicator before it took part in");
    });
    CHECK(SecondsSince(begin) < 2);
  }
}

TEST(GarbageOnALifelineIsRefused) {
  World world({0, 0});
  Communicator& communicator = world.Open(0);
  Puppet(world, 1).SendOnLifeline(std::string(5000, '\xff'));
  const Status status = AllReduceSomehow(communicator);
  CHECK(status.code() == StatusCode::kRankLost);
  CHECK_CONTAINS(status.ToString(), "it sent something that is not a lifeline message");
}

TEST(AnswerForAnUnknownRankIsRefused) {
  World world({0, 0});
  Communicator& communicator = world.Open(0);
  std::thread answer([&] { Puppet(world, 1).AnswerRoll(2, 1); });
  const Status status = communicator.Run(BarrierRequest(), 0.1, nullptr);
  answer.join();
  CHECK(status.code() == StatusCode::kRankLost);
  CHECK_CONTAINS(status.ToString(), "it sent something that is not a lifeline message");
}

TEST(GarbageOnALaneIsRefused) {
  World world({0, 1});
  Communicator& communicator = world.Open(0);
  Puppet(world, 1).Send(std::string(5000, '\xff'));
  const Status status = AllReduceSomehow(communicator);
  CHECK(status.code() == StatusCode::kFailed);
  CHECK_CONTAINS(status.ToString(), "rank 1 sent something that begins no operation");
}

TEST(LongReasonIsCutAtAWholeCharacter) {
  World world({0, 0});
  world.OpenAll();
  std::string reason;
  for (int i = 0; i < 1000; ++i) reason += "\xc3\xa9";
  world.at(0).Abort(reason);
  const Status status = AllReduceSomehow(world.at(1));
  CHECK(status.code() == StatusCode::kAborted);
  CHECK(status.ToString().size() > 1000 && status.ToString().size() <= 1024);
  CHECK_EQ(status.ToString().substr(status.ToString().size() - 2), "\xc3\xa9");
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
