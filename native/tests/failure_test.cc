// Deadlines, aborts, deaths, disagreement and garbage: each a named error on every rank, in time.
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "requests.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Half of the ranks wait in a queued operation, half in a synchronous one.
Status AllReduceSomehow(Communicator& communicator, size_t count = 1024,
                        double timeout_s = kTimeout) {
  std::vector<float> data(count);
  const Operation operation = AllReduceOf(data.data(), data.size());
  if (communicator.rank() % 2 == 0) return communicator.Run(operation, timeout_s, nullptr);
  const auto pending = communicator.Submit(operation, timeout_s);
  return Communicator::Wait(*pending, kTimeout, nullptr);
}

TEST(MissedDeadlineNamesTheRanksThatHadNotJoined) {
  World world({0, 0, 0, 0});
  world.OpenAll();
  world.Run([](Communicator& communicator, int rank) {
    if (rank == 1 || rank == 3) return;
    const Status status = AllReduceSomehow(communicator, 1024, 0.2);
    CHECK(status.code() == StatusCode::kTimeout);
    CHECK_CONTAINS(status.ToString(),
                   "allreduce of 1024 float32 waited 0.2 s: ranks 1, 3 had not joined");
  });
}

TEST(MissedDeadlineNamesTheAbsentHostsRank) {
  for (const auto& hosts : {std::vector{0, 1}, std::vector{0, 1, 2}, std::vector{0, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    const int absent = world.size() - 1;
    world.Run([&](Communicator& communicator, int rank) {
      if (rank == absent) return;
      const Status status = AllReduceSomehow(communicator, 1024, 0.2);
      CHECK(status.code() == StatusCode::kTimeout);
      CHECK_CONTAINS(status.ToString(), "rank " + std::to_string(absent) + " had not joined");
    });
  }
}

TEST(FailedCommunicatorRaisesTheSameCauseAtOnce) {
  World world({0, 0});
  world.OpenAll();
  const Status first = AllReduceSomehow(world.at(0), 1024, 0.05);
  const auto begin = Clock::now();
  CHECK_EQ(AllReduceSomehow(world.at(0)).ToString(), first.ToString());
  CHECK_EQ(world.at(0).failure().value_or(""), first.ToString());
  CHECK(SecondsSince(begin) < 1);
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
    world.Run([](Communicator& communicator, int) {
      const Status status = AllReduceSomehow(communicator, 100'000);
      CHECK(status.code() == StatusCode::kRankLost);
      CHECK_CONTAINS(status.ToString(), "rank 1 was lost");
    });
    death.join();
    CHECK(SecondsSince(begin) < 2);
  }
}

TEST(RanksOfAHostThatDisagreeAreToldWhoSaidWhat) {
  World world({0, 0, 0});
  world.OpenAll();
  world.Run([](Communicator& communicator, int rank) {
    const Status status = AllReduceSomehow(communicator, rank == 2 ? 11 : 200'000);
    CHECK(status.code() == StatusCode::kFailed);
    CHECK_CONTAINS(status.ToString(), "rank 0 said allreduce of 200000 float32 by sum");
    CHECK_CONTAINS(status.ToString(), "rank 1 said allreduce of 200000 float32 by sum");
    CHECK_CONTAINS(status.ToString(), "rank 2 said allreduce of 11 float32 by sum");
  });
}

TEST(HostsThatDisagreeAreToldWhoSaidWhat) {
  World world({0, 1});
  world.OpenAll();
  world.Run([](Communicator& communicator, int rank) {
    std::vector<std::byte> data(64);
    const Status status =
        communicator.Run(BroadcastOf(data.data(), 64, Dtype::kUint8, rank), kTimeout, nullptr);
    CHECK(status.code() == StatusCode::kFailed);
    CHECK_CONTAINS(status.ToString(), "rank 0 said broadcast of 64 uint8 from rank 0");
    CHECK_CONTAINS(status.ToString(), "rank 1 said broadcast of 64 uint8 from rank 1");
  });
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
      const Status status = AllReduceSomehow(communicator);
      CHECK(status.code() == StatusCode::kFailed);
      CHECK_CONTAINS(status.ToString(), "rank 1 closed the communicator before it took part in");
    });
    CHECK(SecondsSince(begin) < 2);
  }
}

void Write(int fd, const std::string& bytes) {
  CHECK_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
           static_cast<ssize_t>(bytes.size()));
}

TEST(GarbageOnALifelineIsRefused) {
  World world({0, 0});
  Communicator& communicator = world.Open(0);
  Write(world.options(1).lifeline_to_next_fd, std::string(5000, '\xff'));
  const Status status = AllReduceSomehow(communicator);
  CHECK(status.code() == StatusCode::kRankLost);
  CHECK_CONTAINS(status.ToString(), "it sent something that is no lifeline message");
}

TEST(GarbageOnALaneIsRefused) {
  World world({0, 1});
  Communicator& communicator = world.Open(0);
  Write(world.options(1).lane_to_next_fd, std::string(5000, '\xff'));
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
