// What a blocked operation has to watch while it waits.
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

// True if a signal wants the calling thread back.
using InterruptCheck = bool (*)();

class Announcements;

// The thread that runs an operation: the progress thread itself must look after the lifelines while
// it is busy; a caller's thread has the progress thread doing so, and has signals to heed.
struct Runner {
  bool is_progress_thread = false;
  // Of the progress thread: whom to wake before it sleeps.
  Announcements* announcements = nullptr;
  InterruptCheck interrupt_check = nullptr;
};

class OperationGuard {
 public:
  // What an operation tells of itself while it runs.
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

  // A guard for a thread that helps the one of this guard, until it is to stop. The lifelines and
  // signals stay with this one's.
  OperationGuard ForHelper(const std::atomic<bool>& stops);

  // Cheap enough for a spin loop.
  bool has_failure() const { return failure_.is_set() || is_stopped(); }

  // Not ok if the communicator failed, a peer left before this operation, or a signal came. To be
  // asked before every sleep.
  Status Check();

  // How long one sleep may last; zero once the deadline has passed.
  std::chrono::milliseconds Slice();

  // Tell it that a sleep ended by a signal, so that the next Check heeds it at once.
  void NoteSignal() { signal_noted_ = true; }

  // Sockets that a sleep in poll() should include; -1 where there is none.
  std::array<int, 2> WatchFds();

  // The status of a missed deadline: asks all ranks who is missing. Or what they tell of meanwhile.
  Status TimedOut();

  // To be asked before every sleep. Once the operation has made no progress for long it asks all
  // ranks who is missing, and posts that; not ok if the operation is to be given up over it.
  Status HeedStall();

  // Data moves, or all ranks are there: what follows is another wait.
  void NoteProgress() { has_progressed_ = true; }

  // This rank waits for others to join. Cheap enough for a spin loop, where it is called now and
  // then: an operation that is not timed otherwise looks at the clock the second time.
  void NoteWaiting() {
    if (times_.arrived != 0) return;
    if (times_.begun != 0 || num_looks_++ > 0) times_.arrived = NowNs();
  }

  // All ranks are there. last: the rank that was waited for last, if that is known; -1 otherwise.
  void NoteAllHere(int last) {
    times_.last = last;
    if (times_.arrived != 0) times_.ready = NowNs();
    NoteProgress();
  }

  // The failure that the lifelines tell of within a moment, or else this one.
  Status NewsOr(const Status& otherwise);

 private:
  bool is_stopped() const { return stops_ != nullptr && stops_->load(std::memory_order_acquire); }
  Status Told() const;
  // The status of an operation that "waited 3 s" or the like.
  Status Missed(const std::string& how);
  void PostStall(const Attendance& attendance, Clock::time_point now);
  // Sleeps until a failure is told of or some time has passed.
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
  // A roll call over a stall that is being answered, and how long that may take.
  std::optional<uint32_t> stall_call_;
  Clock::time_point answers_until_;
};

}  // namespace sparkdl

#endif  // SPARKDL_OPERATION_GUARD_H_
