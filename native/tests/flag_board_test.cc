// Synchronisation through flag lines, and what it says about the distance of the peers.
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

// The boards of two ranks on one segment, and a guard with a timeout.
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

// False under a sanitizer or with a clock that is a system call: everything then takes as long as a
// far line.
bool ReadsTheClockFast() {
  auto least = Clock::duration::max();
  for (int time = 0; time < 100; ++time) {
    const auto begin = Clock::now();
    least = std::min(least, Clock::now() - begin);
  }
  return least < std::chrono::nanoseconds(40);
}

TEST(QuicklyReadFlagsMakeAPeerNear) {
  if (!ReadsTheClockFast()) return;
  Boards boards(10.0);
  PeerDistance distance = Far();
  // The lines were written by this very core.
  for (int time = 0; time < 1000; ++time) {
    boards.theirs.Arrive();
    CHECK(boards.mine.Sync(boards.guard, &distance).ok());
  }
  CHECK(!distance.is_far());
}

TEST(MissingFlagsDoNotChangeTheDistance) {
  Boards boards(0.05);
  PeerDistance distance = Far();
  CHECK(boards.mine.Sync(boards.guard, &distance).code() == StatusCode::kTimeout);
  CHECK(distance.is_far());
}

TEST(FlagsAlreadySeenAreNotReadAgain) {
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
