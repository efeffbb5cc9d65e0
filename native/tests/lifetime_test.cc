// Opening, closing and dropping of communicators.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <filesystem>
#include <functional>
#include <iterator>
#include <vector>

#include "check.h"
#include "requests.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

size_t NumOpenDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

TEST(CloseWaitsForQueuedOperationsAndCanBeRepeated) {
  World world({0, 0});
  world.OpenAll();
  std::vector<float> results(2);
  world.Run([&](Communicator& communicator, int rank) {
    std::vector<float> data(100'000, 1.0F);
    const auto pending = communicator.Submit(AllReduceOf(data.data(), data.size()), kTimeout);
    CHECK_OK(communicator.Close(nullptr));
    CHECK(pending->done());
    CHECK_OK(pending->status());
    CHECK_EQ(data.back(), 2.0F);
    CHECK_OK(communicator.Close(nullptr));
    const Status status = communicator.Run(BarrierRequest(), kTimeout, nullptr);
    CHECK(status.code() == StatusCode::kFailed);
    CHECK_EQ(status.ToString(), "the communicator is closed");
    results[rank] = data.back();
  });
}

TEST(CloseGivesUpAtItsDeadline) {
  World world({0, 0}, 0.1);
  world.OpenAll();
  float value = 0;
  const auto pending = world.at(0).Submit(AllReduceOf(&value, 1), kTimeout);
  const Status status = world.at(0).Close(nullptr);
  CHECK(status.code() == StatusCode::kTimeout);
  CHECK(pending->done());
  CHECK(pending->status().code() == StatusCode::kTimeout);
}

TEST(DroppedCommunicatorEndsItsQueuedOperations) {
  World world({0, 0});
  world.Open(1);
  float value = 0;
  std::shared_ptr<PendingOperation> pending;
  {
    auto opened = Communicator::Open(world.options(0));
    CHECK_OK(opened.status());
    pending = opened.value()->Submit(AllReduceOf(&value, 1), kTimeout);
  }
  CHECK(pending->done());
  CHECK(pending->status().code() == StatusCode::kAborted);
  const Status theirs = world.at(1).Run(BarrierRequest(), kTimeout, nullptr);
  CHECK_CONTAINS(theirs.ToString(), "rank 0 aborted: the communicator was dropped");
}

TEST(DescriptorsAreClosedWithTheCommunicator) {
  const size_t before = NumOpenDescriptors();
  {
    World world({0, 0, 1, 1}, 30.0, Mapping::kOwn);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      CHECK_OK(communicator.Run(BarrierRequest(), kTimeout, nullptr));
      CHECK_OK(communicator.Close(nullptr));
    });
    CHECK_EQ(NumOpenDescriptors(), before + 4);  // an eventfd of each rank, no socket
  }
  CHECK_EQ(NumOpenDescriptors(), before);
}

// The process stays alive: if the descriptors stayed open, its peers would see open lifelines and
// wait for it.
TEST(DescriptorsThatDoNotFitTheTopologyAreRefusedAndClosed) {
  const size_t before = NumOpenDescriptors();
  const auto refusal = [](const std::function<void(CommunicatorOptions&)>& spoil) {
    int pair[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    CommunicatorOptions options;
    options.host_of_rank = {0, 0};
    options.lifeline_to_next_fd = pair[0];
    options.lifeline_from_previous_fd = pair[1];
    spoil(options);
    return Communicator::Open(options).status().ToString();
  };
  const auto small = [] { return ::memfd_create("small", MFD_CLOEXEC); };
  CHECK_CONTAINS(refusal([](CommunicatorOptions&) {}),
                 "segment_fd must be a file descriptor, because 2 ranks are on this host");
  CHECK_CONTAINS(refusal([&](CommunicatorOptions& options) { options.segment_fd = small(); }),
                 "has 0 bytes, 2 ranks need segment_bytes(2)");
  CHECK_CONTAINS(refusal([&](CommunicatorOptions& options) {
                   options.segment_fd = small();
                   options.lane_to_next_fd = small();
                 }),
                 "lane_fds must be (-1, -1)");
  CHECK_CONTAINS(refusal([&](CommunicatorOptions& options) {
                   options.segment_fd = small();
                   ::close(options.lifeline_to_next_fd);
                   options.lifeline_to_next_fd = small();
                 }),
                 ") must be a connected stream socket");
  CHECK_CONTAINS(refusal([](CommunicatorOptions& options) { options.timeout_s = 0; }),
                 "timeout_s must be positive");
  CHECK_EQ(NumOpenDescriptors(), before);
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
