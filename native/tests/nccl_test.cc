// NCCL communicators over the stand-in for NCCL; the ranks are threads of one process here.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "sparkdl/nccl/communicator.h"

namespace sparkdl::tests {
namespace {

constexpr double kTimeout = 20.0;

// Folder in which the ranks of the stand-in find each other.
class Folder {
 public:
  Folder() {
    CHECK(mkdtemp(path_.data()) != nullptr);
    setenv("NCCL_STAND_IN_FOLDER", path_.c_str(), 1);
    setenv("CUDA_STAND_IN_ALL_MEMORY", "1", 1);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

 private:
  std::string path_ = std::filesystem::temp_directory_path() / "sparkdl-nccl-XXXXXX";
};

std::shared_ptr<const NcclLibrary> Library() {
  static const Folder folder;
  static const std::shared_ptr<const NcclLibrary> library = [] {
    auto loaded = NcclLibrary::Load({"/nowhere", SPARKDL_NCCL_STAND_IN}, {SPARKDL_CUDA_STAND_IN});
    CHECK_OK(loaded.status());
    return loaded.value();
  }();
  return library;
}

using Rank = std::function<void(NcclCommunicator&, int)>;

// Opens a communicator of this many ranks and runs the function for each on a thread of its own.
void OnRanks(int world_size, const Rank& function) {
  auto id = Library()->NewUniqueId();
  CHECK_OK(id.status());
  std::vector<std::thread> threads;
  threads.reserve(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const NcclOptions options{
          .rank = rank, .world_size = world_size, .name = "test", .timeout_s = kTimeout};
      auto begun = NcclCommunicator::Begin(Library(), rank, id.value(), options);
      CHECK_OK(begun.status());
      auto ready = begun.value()->WaitReady(kTimeout, nullptr);
      CHECK_OK(ready.status());
      CHECK(ready.value());
      function(*begun.value(), rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

NcclOperation Sum(std::vector<float>& data) {
  NcclOperation operation;
  operation.kind = NcclKind::kAllReduce;
  operation.input = data.data();
  operation.output = data.data();
  operation.count = data.size();
  operation.type = NcclTypeOf("float32").value().number;
  return operation;
}

Status RunAndWait(NcclCommunicator& communicator, const NcclOperation& operation,
                  double timeout_s = kTimeout) {
  auto number = communicator.Run({operation}, nullptr, {}, timeout_s, nullptr);
  SPARKDL_RETURN_IF_ERROR(number.status());
  return communicator.Wait(number.value(), kTimeout, nullptr);
}

TEST(RanksSum) {
  for (const int world_size : {1, 2, 3}) {
    OnRanks(world_size, [&](NcclCommunicator& communicator, int rank) {
      std::vector<float> data(100, static_cast<float>(rank + 1));
      CHECK_OK(RunAndWait(communicator, Sum(data)));
      CHECK_EQ(data[99], static_cast<float>(world_size * (world_size + 1)) / 2);
      CHECK(!communicator.busy());
      CHECK_OK(communicator.Close(nullptr));
      CHECK(!communicator.failure().has_value());
      CHECK_CONTAINS(RunAndWait(communicator, Sum(data)).ToString(), "'test' is closed");
    });
  }
}

TEST(AbortEndsAnOperationThatWaitsForAPeer) {
  OnRanks(2, [&](NcclCommunicator& communicator, int rank) {
    if (rank == 1) return;
    std::vector<float> data(10);
    auto number = communicator.Run({Sum(data)}, nullptr, {}, kTimeout, nullptr);
    CHECK_OK(number.status());
    std::thread other([&] {
      CHECK(communicator.busy());
      communicator.Abort(Status(StatusCode::kAborted, "enough"));
    });
    const Status status = communicator.Wait(number.value(), kTimeout, nullptr);
    CHECK(status.code() == StatusCode::kAborted);
    CHECK_EQ(status.ToString(), "enough");
    other.join();
    CHECK_OK(communicator.Close(nullptr));
    CHECK_EQ(communicator.failure().value_or(""), "enough");
  });
}

TEST(CommunicatorDroppedDuringAnOperationIsAborted) {
  std::vector<float> data(10);
  OnRanks(2, [&](NcclCommunicator& communicator, int rank) {
    if (rank == 0) CHECK_OK(communicator.Run({Sum(data)}, nullptr, {}, kTimeout, nullptr).status());
  });
}

TEST(MissedDeadlineIsAFailure) {
  OnRanks(2, [&](NcclCommunicator& communicator, int rank) {
    if (rank == 1) return;
    std::vector<float> data(10);
    const Status status = RunAndWait(communicator, Sum(data), 0.1);
    CHECK(status.code() == StatusCode::kTimeout);
    CHECK_CONTAINS(status.ToString(),
                   "allreduce of 10 float32 on 'test' was not complete on GPU 0");
    CHECK_OK(communicator.Close(nullptr));
  });
}

TEST(OpeningWithoutAPeerCanBeGivenUp) {
  const NcclOptions options{.rank = 0, .world_size = 2, .name = "test", .timeout_s = kTimeout};
  auto begun = NcclCommunicator::Begin(Library(), 0, Library()->NewUniqueId().value(), options);
  CHECK_OK(begun.status());
  auto ready = begun.value()->WaitReady(0.05, nullptr);
  CHECK_OK(ready.status());
  CHECK(!ready.value());
}

TEST(ThreadsOfARankTakeTurns) {
  constexpr int kNumThreads = 4;
  constexpr int kNumCalls = 20;
  OnRanks(1, [&](NcclCommunicator& communicator, int /*rank*/) {
    std::vector<std::thread> threads;
    threads.reserve(kNumThreads);
    for (int i = 0; i < kNumThreads; ++i) {
      threads.emplace_back([&] {
        std::vector<float> data(10, 1.0F);
        for (int call = 0; call < kNumCalls; ++call) {
          CHECK_OK(RunAndWait(communicator, Sum(data)));
        }
        CHECK_EQ(data[9], 1.0F);
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_OK(communicator.Close(nullptr));
  });
}

TEST(SplitOrdersRanksByKeyAndLeavesOthersOut) {
  OnRanks(3, [&](NcclCommunicator& communicator, int rank) {
    const NcclOptions options{
        .rank = 1 - rank, .world_size = 2, .name = "part", .timeout_s = kTimeout};
    auto begun = communicator.BeginSplit(rank == 2 ? kNcclNoColor : 0, -rank, options, nullptr);
    CHECK_OK(begun.status());
    CHECK_EQ(begun.value() == nullptr, rank == 2);
    if (rank == 2) {
      CHECK(communicator.WaitReady(kTimeout, nullptr).value());
    } else {
      NcclCommunicator& part = *begun.value();
      CHECK(part.WaitReady(kTimeout, nullptr).value());
      std::vector<float> data(3, static_cast<float>(rank));
      NcclOperation broadcast = Sum(data);
      broadcast.kind = NcclKind::kBroadcast;
      CHECK_OK(RunAndWait(part, broadcast));
      CHECK_EQ(data[0], 1.0F);  // the key puts rank 1 first
      CHECK_OK(part.Close(nullptr));
    }
    std::vector<float> data(3, 1.0F);
    CHECK_OK(RunAndWait(communicator, Sum(data)));
    CHECK_EQ(data[2], 3.0F);
    CHECK_OK(communicator.Close(nullptr));
  });
}

TEST(SplitThatARankDoesNotJoinCanBeGivenUpOnBothSides) {
  OnRanks(2, [&](NcclCommunicator& communicator, int rank) {
    if (rank == 1) return;
    const NcclOptions options{.rank = 0, .world_size = 2, .name = "part", .timeout_s = kTimeout};
    auto begun = communicator.BeginSplit(0, 0, options, nullptr);
    CHECK_OK(begun.status());
    CHECK(!begun.value()->WaitReady(0.05, nullptr).value());
    begun.value() = nullptr;
    CHECK_CONTAINS(communicator.failure().value_or(""), "could not be split off 'test'");
  });
}

TEST(MissingSymbolsAreNamed) {
  const auto loaded = NcclLibrary::Load({SPARKDL_CUDA_STAND_IN}, {SPARKDL_CUDA_STAND_IN});
  CHECK_CONTAINS(loaded.status().ToString(), "lacks ncclGetVersion, ncclGetErrorString");
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
