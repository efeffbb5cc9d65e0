// Failures, deadline, signals and stalls, which an operation watches while it waits.
#ifndef SPARKDL_OPERATION_GUARD_H_
#define SPARKDL_OPERATION_GUARD_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "sparkdl/deadline.h"
#include "sparkdl/failure_latch.h"
#include "sparkdl/operation.h"
#include "sparkdl/operation_times.h"
#include "sparkdl/stall_board.h"
#include "sparkdl/status.h"
#include "sparkdl/tcp/lifeline.h"

namespace sparkdl {

// Returns true if a signal is to interrupt the calling thread.
using InterruptCheck = bool (*)();

class Announcements;

// The thread that runs an operation. The progress thread must serve the lifelines itself while it
// is busy. For a thread of the caller, the progress thread serves them, but that thread must handle
// signals.
struct Runner {
  bool is_progress_thread = false;
  // For the progress thread: waiters to wake before it sleeps.
  Announcements* announcements = nullptr;
  InterruptCheck interrupt_check = nullptr;
};

class OperationGuard {
 public:
  // Where an operation reports its times and stalls while it runs.
  struct Telling {
    OperationTimes& times;
    StallBoard& stalls;
  };

  OperationGuard(const Operation& operation, const Signature& signature, double timeout_s,
                 FailureLatch& failure, Lifeline& lifeline, Runner runner, Telling telling)
      : operation_(operation),
        signature_(signature),
        deadline_(timeout_s),
        failure_(failure),
        lifeline_(lifeline),
        runner_(runner),
        times_(telling.times),
        stalls_(telling.stalls) {}

  const Signature& signature() const { return signature_; }
  std::string Summary() const { return Summarize(operation_); }

  // A guard for a thread that helps the thread of this guard, until `stops` is set. The thread of
  // this guard continues to handle lifelines and signals.
  OperationGuard ForHelper(const std::atomic<bool>& stops);

  // Cheap enough for a spin loop.
  bool has_failure() const { return failure_.is_set() || is_stopped(); }

  // Fails if the communicator has failed, a peer left before this operation, or a signal came. Must
  // be called before every sleep.
  Status Check();

  // Longest duration of one sleep; zero once the deadline has passed.
  std::chrono::milliseconds Slice();

  // Notes that a signal ended a sleep, so that the next Check() handles it at once.
  void NoteSignal() { signal_noted_ = true; }

  // Sockets to include if the thread sleeps in poll(); -1 where there is none.
  std::array<int, 2> WatchFds();

  // Status of a missed deadline. Asks all ranks which of them are missing; returns a failure that
  // is reported meanwhile instead.
  Status TimedOut();

  // Must be called before every sleep. If the operation has made no progress for a long time, asks
  // all ranks which of them are missing, and posts the answer. Fails if the operation is to be
  // given up because of the stall.
  Status HeedStall();

  // Notes that data has moved or that all ranks have joined: a wait that follows is a new one.
  void NoteProgress() { has_progressed_ = true; }

  // Notes that this rank waits for others to join. Cheap enough for a spin loop, which calls it now
  // and then: in an operation that is not timed otherwise, only the second call reads the clock.
  void NoteWaiting() {
    if (times_.arrived != 0) return;
    if (times_.begun != 0 || num_looks_++ > 0) times_.arrived = NowNs();
  }

  // Notes that all ranks have joined. last: rank that was waited for last; -1 if that is not known.
  void NoteAllHere(int last) {
    times_.last = last;
    if (times_.arrived != 0) times_.ready = NowNs();
    NoteProgress();
  }

  // Waits a moment for a failure to be reported and returns it; otherwise returns `otherwise`.
  Status NewsOr(const Status& otherwise);

 private:
  bool is_stopped() const { return stops_ != nullptr && stops_->load(std::memory_order_acquire); }
  Status Told() const;
  // Status of an operation that missed a time limit; `how` is, for example, "waited 3 s".
  Status Missed(const std::string& how);
  void PostStall(const Attendance& attendance, Clock::time_point now);
  // Sleeps until there may be news of a failure, at most for the given time.
  void WaitForNews(std::chrono::milliseconds longest);

  const Operation& operation_;
  const Signature& signature_;
  Deadline deadline_;
  FailureLatch& failure_;
  Lifeline& lifeline_;
  Runner runner_;
  const std::atomic<bool>* stops_ = nullptr;
  bool signal_noted_ = false;
  Clock::time_point next_interrupt_check_;
  OperationTimes& times_;
  StallBoard& stalls_;
  int num_looks_ = 0;
  bool has_progressed_ = true;
  Clock::time_point waits_since_;
  Clock::time_point next_warning_;
  // Roll call about a stall whose answers are awaited, and the time until which they are.
  std::optional<uint32_t> stall_call_;
  Clock::time_point answers_until_;
};

}  // namespace sparkdl

#endif  // SPARKDL_OPERATION_GUARD_H_
