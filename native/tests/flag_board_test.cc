// Synchronisation through flag lines, and what it tells of the peers' distance.
#include "sparkdl/shm/flag_board.h"

#include <algorithm>

#include "check.h"
#include "sparkdl/failure_latch.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/stall_board.h"
#include "sparkdl/tcp/lifeline.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

constexpr std::chrono::nanoseconds kSlow{1000};

// Two ranks' boards over one segment. The guard waits so long and no longer.
struct Boards {
  explicit Boards(double timeout_s)
      : guard(operation, signature, timeout_s, failure, lifeline, Runner{},
              {.times = times, .stalls = stalls}) {
    mine.Begin(signature);
    theirs.Begin(signature);
  }

  World world{{0, 0}};
  FlagBoard mine{world.options(0).segment, 0, {0, 1}};
  FlagBoard theirs{world.options(0).segment, 1, {0, 1}};
  Operation operation;
  Signature signature = SignatureOf(operation, 0);
  FailureLatch failure;
  Lifeline lifeline{0, 1, {}, {}, failure};
  OperationTimes times;
  StallBoard stalls{StallOptions{}};
  OperationGuard guard;
};

PeerDistance Far() {
  PeerDistance distance;
  for (int time = 0; time < 1000; ++time) distance.Note(kSlow);
  CHECK(distance.is_far());
  return distance;
}

// Under a sanitizer or with a clock that is a system call, everything takes as long as a far line.
bool ReadsTheClockFast() {
  auto least = Clock::duration::max();
  for (int time = 0; time < 100; ++time) {
    const auto begin = Clock::now();
    least = std::min(least, Clock::now() - begin);
  }
  return least < std::chrono::nanoseconds(40);
}

TEST(FlagsThatComeFastTellOfANearPeer) {
  if (!ReadsTheClockFast()) return;
  Boards boards(10.0);
  PeerDistance distance = Far();
  // Of lines that this very core has written.
  for (int time = 0; time < 1000; ++time) {
    boards.theirs.Arrive();
    CHECK(boards.mine.Sync(boards.guard, &distance).ok());
  }
  CHECK(!distance.is_far());
}

TEST(FlagsThatDoNotComeTellNothing) {
  Boards boards(0.05);
  PeerDistance distance = Far();
  CHECK(boards.mine.Sync(boards.guard, &distance).code() == StatusCode::kTimeout);
  CHECK(distance.is_far());
}

TEST(FlagsThatWereSeenAreNotReadAgain) {
  Boards boards(10.0);
  PeerDistance distance = Far();
  for (int time = 0; time < 1000; ++time) boards.theirs.Arrive();
  for (int time = 0; time < 1000; ++time) {
    CHECK(boards.mine.Sync(boards.guard, &distance).ok());
  }
  CHECK(distance.is_far());
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
