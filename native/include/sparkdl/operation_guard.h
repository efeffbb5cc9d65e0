// What a blocked operation has to watch while it waits.
#ifndef SPARKDL_OPERATION_GUARD_H_
#define SPARKDL_OPERATION_GUARD_H_

#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "sparkdl/deadline.h"
#include "sparkdl/failure_latch.h"
#include "sparkdl/lifeline.h"
#include "sparkdl/operation.h"
#include "sparkdl/status.h"

namespace sparkdl {

// True if a signal wants the calling thread back.
using InterruptCheck = bool (*)();

// The thread that runs an operation: the progress thread itself must look after the lifelines while
// it is busy; a caller's thread has the progress thread doing so, and has signals to heed.
struct Runner {
  bool is_progress_thread = false;
  InterruptCheck interrupt_check = nullptr;
};

class OperationGuard {
 public:
  OperationGuard(const Signature& signature, double timeout_s, FailureLatch& failure,
                 Lifeline& lifeline, Runner runner)
      : signature_(signature),
        deadline_(timeout_s),
        failure_(failure),
        lifeline_(lifeline),
        runner_(runner) {}

  const Signature& signature() const { return signature_; }

  // Cheap enough for a spin loop.
  bool has_failure() const { return failure_.is_set(); }

  // Not ok if the communicator failed, a peer left before this operation, or a signal came. To be
  // asked before every sleep.
  Status Check();

  // How long one sleep may last; zero once the deadline has passed.
  std::chrono::milliseconds Slice();

  // Tell it that a sleep ended by a signal, so that the next Check heeds it at once.
  void NoteSignal() { signal_noted_ = true; }

  // Sockets that a sleep in poll() should include; -1 where there is none.
  std::array<int, 2> WatchFds();

  // The status of a missed deadline, told by who is known to be missing.
  Status TimedOut(const std::string& who) const;

  // As TimedOut, when others can tell better: waits a moment for their news first.
  Status TimedOutUnlessTold(const std::string& who);

  // The failure that the lifelines tell of within a moment, or else this one.
  Status NewsOr(const Status& otherwise);

 private:
  Status Told() const;

  const Signature& signature_;
  Deadline deadline_;
  FailureLatch& failure_;
  Lifeline& lifeline_;
  Runner runner_;
  bool signal_noted_ = false;
  Clock::time_point next_interrupt_check_;
};

// "rank 3", "ranks 1, 3".
std::string NameRanks(const std::vector<int>& ranks);

}  // namespace sparkdl

#endif  // SPARKDL_OPERATION_GUARD_H_
