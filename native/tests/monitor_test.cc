// Measurements of operations: totals, records, which rank came last, stalls.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "requests.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kMillisecond = 1'000'000;

Status Reduce(Communicator& communicator, size_t count, const std::string& name = "") {
  std::vector<float> data(count, 1.0F);
  Operation operation = AllReduceOf(data.data(), data.size());
  operation.name = name;
  return communicator.Run(operation, kTimeout, nullptr);
}

Status Wait(const std::shared_ptr<PendingOperation>& pending) {
  return Communicator::Wait(*pending, kTimeout, nullptr);
}

KindTotals TotalsOf(const Communicator& communicator, OpKind kind) {
  for (const KindTotals& totals : communicator.monitor()->totals()) {
    if (totals.kind == kind) return totals;
  }
  return {};
}

// Waits until the monitor reports that a rank waits in the operation of that name: by then the rank
// has joined the operation, however busy the machine is.
void UntilItWaitsIn(const std::string& name, Communicator& communicator) {
  const std::string quoted = "'" + name + "'";
  const int64_t end = NowNs() + static_cast<int64_t>(kTimeout * 1e9);
  for (;;) {
    const std::optional<sparkdl::Wait> wait = communicator.monitor()->stalls().wait();
    if (wait.has_value() && wait->operation.find(quoted) != std::string::npos) return;
    if (NowNs() > end) {
      CHECK_EQ("nobody waits in " + name, "");
      return;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
}

// A reported wait has lasted this long, give or take a reading of the clock.
constexpr uint64_t kToldNs = 200 * kMillisecond;

TEST(CountsAndBytesAreExactHoweverFewOperationsAreTimed) {
  for (const auto& hosts : {std::vector{0}, std::vector{0, 0}, std::vector{0, 1}}) {
    World world(hosts);
    world.OpenAll();
    static constexpr uint64_t kCount = 3 * OperationMonitor::kNumTimed;
    world.Run([](Communicator& communicator, int) {
      for (uint64_t i = 0; i < kCount; ++i) CHECK_OK(Reduce(communicator, 10));
      std::vector<std::byte> block(8);
      std::vector<std::byte> all(8 * static_cast<size_t>(communicator.world_size()));
      CHECK_OK(
          communicator.Run(Between(OpKind::kAllGather, block.data(), all.data(), 2, Dtype::kInt32),
                           kTimeout, nullptr));
      const KindTotals reduced = TotalsOf(communicator, OpKind::kAllReduce);
      CHECK_EQ(reduced.count, kCount);
      CHECK_EQ(reduced.bytes, kCount * 40);
      CHECK_EQ(reduced.num_failed, 0U);
      CHECK(reduced.busy_ns > 0);
      CHECK(reduced.waiting_ns <= reduced.busy_ns);
      CHECK_EQ(reduced.exposed_ns, reduced.busy_ns);
      CHECK_EQ(TotalsOf(communicator, OpKind::kAllGather).bytes, all.size());
      CHECK_EQ(communicator.monitor()->totals().size(), 2U);
    });
  }
}

TEST(LongWaitIsExactInAnOperationThatIsNotTimed) {
  World world({0, 0, 0});
  world.OpenAll();
  static constexpr uint64_t kCount = 5;
  world.Run([&](Communicator& communicator, int rank) {
    for (uint64_t i = 0; i < OperationMonitor::kNumTimed; ++i) CHECK_OK(Reduce(communicator, 1));
    const uint64_t before = TotalsOf(communicator, OpKind::kAllReduce).waiting_ns;
    for (uint64_t i = 0; i < kCount; ++i) {
      const std::string name = "late " + std::to_string(i);
      for (const int other : {0, 2}) {
        if (rank == 1) UntilItWaitsIn(name, world.at(other));
      }
      CHECK_OK(Reduce(communicator, 1, name));
    }
    const KindTotals totals = TotalsOf(communicator, OpKind::kAllReduce);
    if (rank == 1) return;
    CHECK(totals.waiting_ns - before >= kCount * kToldNs);
    CHECK(totals.busy_ns >= totals.waiting_ns);
    bool is_blamed = false;
    for (const Lateness& late : communicator.monitor()->lateness()) {
      CHECK(late.rank != rank);
      if (late.rank != 1) continue;
      is_blamed = late.count >= kCount && late.waited_ns >= kCount * kToldNs;
    }
    CHECK(is_blamed);
  });
}

TEST(TimesOfARecordedOperationAreInOrderOnEveryTopology) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([&](Communicator& communicator, int rank) {
      OperationMonitor& monitor = *communicator.monitor();
      monitor.StartRecording(100);
      const int64_t begin = NowNs();
      for (int i = 0; i < 5; ++i) {
        for (int other = 1; rank == 0 && i == 0 && other < world.size(); ++other) {
          UntilItWaitsIn("weights", world.at(other));
        }
        CHECK_OK(Reduce(communicator, 1000, "weights"));
        float value = 1;
        CHECK_OK(Wait(communicator.Submit(AllReduceOf(&value, 1), kTimeout)));
      }
      monitor.StopRecording();
      CHECK_OK(Reduce(communicator, 1000));
      const auto taken = monitor.TakeRecords();
      CHECK_EQ(taken.records.size(), 10U);
      CHECK_EQ(taken.num_dropped, 0U);
      int64_t latest = begin;
      for (const OperationRecord& record : taken.records) {
        const OperationTimes& times = record.times;
        const bool is_queued = record.sequence % 2 == 1;
        CHECK_EQ(record.name, is_queued ? "" : "weights");
        CHECK_EQ(record.bytes, is_queued ? 4U : 4000U);
        CHECK(record.is_ok);
        CHECK_EQ(times.queued != 0, is_queued);
        CHECK(latest <= times.begun);
        if (is_queued) CHECK(latest <= times.queued && times.queued <= times.begun);
        if (times.ready != 0) {
          CHECK(times.begun <= times.arrived && times.arrived <= times.ready);
          CHECK(times.ready <= times.done);
        }
        CHECK(times.begun < times.done);
        latest = times.done;
      }
      CHECK(latest <= NowNs());
      if (rank == 0) return;
      CHECK(std::ranges::any_of(
          taken.records, [](const OperationRecord& record) { return record.times.waited() > 0; }));
    });
  }
}

TEST(RecordingKeepsTheLatestOperationsAndCountsTheOthers) {
  World world({0});
  world.OpenAll();
  OperationMonitor& monitor = *world.at(0).monitor();
  monitor.StartRecording(10);
  for (int i = 0; i < 25; ++i) CHECK_OK(Reduce(world.at(0), 1, std::to_string(i)));
  const auto taken = monitor.TakeRecords();
  CHECK_EQ(taken.records.size(), 10U);
  CHECK_EQ(taken.records.front().name, "15");
  CHECK_EQ(taken.records.back().name, "24");
  CHECK_EQ(taken.num_dropped, 15U);
  CHECK_OK(Reduce(world.at(0), 1));
  CHECK_EQ(monitor.TakeRecords().num_dropped, 0U);
}

TEST(RecordsMayBeTakenWhileOperationsRun) {
  World world({0, 0});
  world.OpenAll();
  size_t num_taken = 0;
  world.at(0).monitor()->StartRecording(50);
  std::thread taker([&] {
    while (num_taken < 2000) {
      const auto taken = world.at(0).monitor()->TakeRecords();
      num_taken += taken.records.size() + taken.num_dropped;
      static_cast<void>(world.at(0).monitor()->totals());
    }
  });
  world.Run([](Communicator& communicator, int) {
    for (int i = 0; i < 2000; ++i) CHECK_OK(Reduce(communicator, 1));
  });
  taker.join();
  CHECK_EQ(num_taken, 2000U);
}

// Waits until a thread of the rank has been blocked for this long from now on.
void UntilBlockedFor(uint64_t duration_ns, Communicator& communicator) {
  BlockedClock& clock = communicator.monitor()->blocked_clock();
  const int64_t begin = clock.At(NowNs());
  const int64_t end = NowNs() + static_cast<int64_t>(kTimeout * 1e9);
  while (clock.At(NowNs()) - begin < static_cast<int64_t>(duration_ns)) {
    if (NowNs() > end) {
      CHECK_EQ(std::string("nobody is blocked"), "");
      return;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST(QueuedOperationIsExposedOnlyWhileAThreadWaitsForIt) {
  World world({0, 0});
  world.OpenAll();
  world.Run([&](Communicator& communicator, int rank) {
    std::vector<float> data(1);
    // Rank 1 comes late to both operations; rank 0 waits only for the second.
    for (const bool waits : {false, true}) {
      const KindTotals before = TotalsOf(communicator, OpKind::kAllReduce);
      Operation operation = AllReduceOf(data.data(), 1);
      operation.name = waits ? "waited for" : "not waited for";
      if (rank == 1) {
        UntilItWaitsIn(operation.name, world.at(0));
        if (waits) UntilBlockedFor(20 * kMillisecond, world.at(0));
      }
      const auto pending = communicator.Submit(operation, kTimeout);
      while (!waits && !pending->done()) std::this_thread::sleep_for(milliseconds(1));
      CHECK_OK(Wait(pending));
      const KindTotals after = TotalsOf(communicator, OpKind::kAllReduce);
      if (rank == 1) continue;
      const uint64_t busy = after.busy_ns - before.busy_ns;
      const uint64_t exposed = after.exposed_ns - before.exposed_ns;
      CHECK(busy >= kToldNs);
      CHECK(after.waiting_ns - before.waiting_ns >= kToldNs);
      CHECK(exposed <= busy);
      if (waits) {
        CHECK(exposed >= 20 * kMillisecond);
      } else {
        CHECK_EQ(exposed, 0U);
      }
    }
  });
}

TEST(FailedOperationsAreCountedSeparately) {
  World world({0, 0});
  world.OpenAll();
  world.Run([](Communicator& communicator, int rank) {
    communicator.monitor()->StartRecording(10);
    CHECK(Reduce(communicator, rank == 0 ? 1 : 2).code() == StatusCode::kMismatch);
    CHECK_OK(Reduce(communicator, 3));
    const KindTotals totals = TotalsOf(communicator, OpKind::kAllReduce);
    CHECK_EQ(totals.count, 1U);
    CHECK_EQ(totals.num_failed, 1U);
    CHECK_EQ(totals.bytes, 12U);
    const auto taken = communicator.monitor()->TakeRecords();
    CHECK_EQ(taken.records.size(), 2U);
    CHECK(!taken.records.front().is_ok && taken.records.back().is_ok);
  });
}

TEST(ArrivalsAreKeptIfTheCommunicatorSpansHosts) {
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([&](Communicator& communicator, int) {
      const int64_t begin = NowNs();
      for (int i = 0; i < 3; ++i) CHECK_OK(Reduce(communicator, 1));
      const auto arrivals = communicator.monitor()->arrivals();
      CHECK_EQ(arrivals.size(), hosts.back() == 0 ? 0U : 3U);
      for (size_t i = 0; i < arrivals.size(); ++i) {
        CHECK_EQ(arrivals[i].sequence, i);
        CHECK(begin <= arrivals[i].time_ns && arrivals[i].time_ns <= NowNs());
      }
    });
  }
}

// Stalls

TEST(StallNamesTheMissingRanksAndTheOperationContinues) {
  for (const auto& hosts : {std::vector{0, 0, 0}, std::vector{0, 1, 2}, std::vector{0, 0, 1}}) {
    const UniqueFd news(::eventfd(0, EFD_NONBLOCK));
    World world(hosts, kTimeout, {.warn_after_s = 0.1, .notice_fd = news.get()});
    world.OpenAll();
    std::atomic<int> num_told{0};
    world.Run([&](Communicator& communicator, int rank) {
      StallBoard& stalls = communicator.monitor()->stalls();
      if (rank == 2) {
        while (num_told < 2) std::this_thread::sleep_for(milliseconds(5));
        CHECK_OK(Reduce(communicator, 5, "weights"));
        CHECK(!stalls.Take().has_value());
        return;
      }
      std::vector<float> data(5);
      Operation operation = AllReduceOf(data.data(), data.size());
      operation.name = "weights";
      const auto pending = communicator.Submit(operation, kTimeout);
      std::optional<StallNotice> notice;
      while (!notice.has_value()) {
        std::this_thread::sleep_for(milliseconds(5));
        notice = stalls.Take();
      }
      ++num_told;
      CHECK_EQ(notice->operation, "allreduce 'weights' of 5 float32");
      CHECK_EQ(notice->sequence, 0U);
      CHECK(notice->waited_s >= 0.1);
      CHECK_EQ(notice->who, "rank 2 had not joined");
      CHECK_OK(Wait(pending));
    });
    uint64_t count = 0;
    CHECK_EQ(::read(news.get(), &count, sizeof(count)), static_cast<ssize_t>(sizeof(count)));
    CHECK(count >= 2);
  }
}

TEST(StallIsReportedAgainAfterEachInterval) {
  constexpr double kWarnAfterS = 0.05;
  World world({0, 0}, kTimeout, {.warn_after_s = kWarnAfterS});
  world.OpenAll();
  std::atomic<bool> is_told{false};
  world.Run([&](Communicator& communicator, int rank) {
    if (rank == 1) {
      is_told.wait(false);
      CHECK_OK(Reduce(communicator, 1));
      return;
    }
    float value = 1;
    const auto pending = communicator.Submit(AllReduceOf(&value, 1), kTimeout);
    double waited = 0;
    for (int num_told = 0; num_told < 3;) {
      const auto notice = communicator.monitor()->stalls().Take();
      if (notice.has_value()) {
        ++num_told;
        // Not from one notice to the next: the answers to a roll call may take long on a busy
        // machine.
        CHECK(notice->waited_s >= num_told * kWarnAfterS);
        CHECK(notice->waited_s > waited);
        waited = notice->waited_s;
      }
      pending->WaitFor(milliseconds(1));
    }
    is_told = true;
    is_told.notify_all();
    CHECK_OK(Communicator::Wait(*pending, kTimeout, nullptr));
  });
}

TEST(StallThatLastsTooLongEndsTheCommunicator) {
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 1}}) {
    World world(hosts, kTimeout, {.warn_after_s = 0.05, .abort_after_s = 0.2});
    world.OpenAll();
    world.Run([](Communicator& communicator, int rank) {
      if (rank == 0) {
        const Status status = Reduce(communicator, 1, "weights");
        CHECK(status.code() == StatusCode::kTimeout);
        CHECK_CONTAINS(status.ToString(),
                       "allreduce 'weights' of 1 float32 stalled for 0.2 s: rank 1 had not joined");
        return;
      }
      while (!communicator.failure().has_value()) std::this_thread::sleep_for(milliseconds(5));
      CHECK_CONTAINS(Reduce(communicator, 1).ToString(), "rank 1 had not joined");
    });
  }
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
