// Opening, closing, dropping.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <filesystem>
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

TEST(CloseWaitsForWhatIsQueuedAndCanBeRepeated) {
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
    CHECK_EQ(NumOpenDescriptors(), before + 4);  // one of each rank's own, no socket
  }
  CHECK_EQ(NumOpenDescriptors(), before);
}

TEST(DescriptorsThatDoNotFitTheTopologyAreRefusedAndStayOpen) {
  int pair[2];
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const UniqueFd first(pair[0]);
  const UniqueFd second(pair[1]);
  const UniqueFd small(::memfd_create("small", MFD_CLOEXEC));
  CommunicatorOptions options;
  options.host_of_rank = {0, 0};
  options.lifeline_to_next_fd = first.get();
  options.lifeline_from_previous_fd = second.get();
  CHECK_CONTAINS(Communicator::Open(options).status().ToString(),
                 "segment_fd must be a file descriptor, because 2 ranks are on this host");
  options.segment_fd = small.get();
  CHECK_CONTAINS(Communicator::Open(options).status().ToString(),
                 "has 0 bytes, 2 ranks need segment_bytes(2)");
  options.lane_to_next_fd = first.get();
  CHECK_CONTAINS(Communicator::Open(options).status().ToString(), "lane_fds must be (-1, -1)");
  options.lane_to_next_fd = -1;
  options.lifeline_to_next_fd = small.get();
  CHECK_CONTAINS(Communicator::Open(options).status().ToString(),
                 "lifeline_fds[0] (file descriptor " + std::to_string(small.get()) +
                     ") must be a connected stream socket");
  options.timeout_s = 0;
  CHECK_CONTAINS(Communicator::Open(options).status().ToString(), "timeout_s must be positive");
  CHECK(::fcntl(first.get(), F_GETFD) >= 0 && ::fcntl(small.get(), F_GETFD) >= 0);
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
