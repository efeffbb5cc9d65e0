#include "sparkdl/communicator.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "sparkdl/deadline.h"
#include "sparkdl/float_environment.h"

namespace sparkdl {
namespace {

constexpr std::chrono::milliseconds kSlice{100};

}  // namespace

Status Communicator::CheckProcess() const {
  if (ForkGeneration() == fork_generation_) return {};
  return Status(StatusCode::kFailed,
                "this process was forked from the rank that opened the communicator; only the rank "
                "itself can use it");
}

Status Communicator::Validate(const Operation& operation) const {
  SPARKDL_RETURN_IF_ERROR(CheckProcess());
  if (IsReducing(operation.kind) &&
      FindReduceKernels(operation.dtype, operation.reduce_op) == nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  "bools have no average; convert them to a number first");
  }
  if (IsRooted(operation.kind) && (operation.root < 0 || operation.root >= world_size())) {
    return Status(StatusCode::kInvalidArgument, "root " + std::to_string(operation.root) +
                                                    " is outside a world of " +
                                                    std::to_string(world_size()) + " ranks");
  }
  return {};
}

bool Communicator::TryAcquireTurn() {
  return !turn_is_taken_.load(std::memory_order_relaxed) &&
         !turn_is_taken_.exchange(true, std::memory_order_seq_cst);
}

void Communicator::ReleaseTurn() {
  turn_is_taken_.store(false, std::memory_order_seq_cst);
  // The progress thread may have found the turn taken and gone to sleep.
  if (num_pending_.load(std::memory_order_seq_cst) != 0) WakeProgressThread();
}

Status Communicator::Run(const Operation& operation, double timeout_s,
                         InterruptCheck interrupt_check) {
  if (num_pending_.load(std::memory_order_acquire) == 0 && TryAcquireTurn()) {
    OperationTimes times;
    Status status =
        Execute(operation, timeout_s,
                {.is_progress_thread = false, .interrupt_check = interrupt_check}, times);
    ReleaseTurn();
    return status;
  }
  const auto pending = Submit(operation, timeout_s);
  const BlockedSection blocked(monitor_->blocked_clock());
  bool is_interrupted = false;
  while (!pending->done()) {
    pending->WaitFor(kSlice);
    // When this method returns, the caller may use the buffers again, so an interrupt must end the
    // operation first.
    if (pending->done() || is_interrupted || interrupt_check == nullptr) continue;
    if (interrupt_check()) {
      is_interrupted = true;
      static_cast<void>(
          Fail(Status(StatusCode::kInterrupted, "a signal interrupted an operation")));
    }
  }
  if (is_interrupted) return Status(StatusCode::kInterrupted, "a signal interrupted an operation");
  return pending->status();
}

Status Communicator::Execute(const Operation& operation, double timeout_s, Runner runner,
                             OperationTimes& times) {
  if (failure_.is_set()) return failure_.status();
  if (is_closing_.load(std::memory_order_acquire) && !runner.is_progress_thread) {
    return Status(StatusCode::kFailed, "the communicator is closed");
  }
  const Signature signature = SignatureOf(operation, next_sequence_);
  OperationGuard guard(operation, signature, timeout_s, failure_, lifeline_, runner,
                       {.times = times, .stalls = monitor_->stalls()});
  if (lifeline_.has_leaver()) {
    if (Status status = guard.Check(); !status.ok()) return Fail(status);
  }
  lifeline_.NoteBegun(signature.sequence);
  monitor_->Begin(operation, runner.is_progress_thread, times);
  Status status;
  try {
    const DefaultFloatEnvironment floats;
    for (const PackedArray* packed : operation.packed) packed->BeforeOperation();
    status = collectives_.Run(operation, guard);
    for (const PackedArray* packed : operation.packed) {
      if (status.ok()) packed->AfterOperation();
    }
  } catch (const std::bad_alloc&) {
    status = Status(StatusCode::kFailed, "out of memory in " + Summarize(operation));
  } catch (const std::exception& error) {
    // For example, a thread could not be started.
    status = Status(StatusCode::kFailed, Summarize(operation) + " failed: " + error.what());
  }
  monitor_->stalls().EndWait();
  monitor_->Finish(operation, next_sequence_, runner.is_progress_thread, status.ok(), times);
  ++next_sequence_;
  // A mismatch occurs on all ranks and leaves nothing half done.
  if (status.ok() || status.code() == StatusCode::kMismatch) return status;
  return Fail(status);
}

Status Communicator::Join(double timeout_s, InterruptCheck interrupt_check, int& last) {
  int64_t joined_last = -1;
  Operation join;
  join.kind = OpKind::kJoin;
  join.output = reinterpret_cast<std::byte*>(&joined_last);
  while (joined_last < 0) {
    SPARKDL_RETURN_IF_ERROR(Run(join, timeout_s, interrupt_check));
  }
  last = static_cast<int>(joined_last);
  return {};
}

// Makes the status the communicator's failure, unless it has one already, and returns the failure;
// for kInterrupted, returns the status.
Status Communicator::Fail(const Status& status) {
  Status shared = status;
  if (status.code() == StatusCode::kInterrupted) {
    shared = Status(StatusCode::kAborted,
                    "rank " + std::to_string(rank()) + " stopped: " + status.ToString());
  } else if (status.code() == StatusCode::kFailed || status.code() == StatusCode::kTimeout) {
    shared = Status(status.code(), "rank " + std::to_string(rank()) + ": " + status.ToString());
  }
  if (failure_.Set(shared)) lifeline_.Spread(shared);
  return status.code() == StatusCode::kInterrupted ? status : failure_.status();
}

Status Communicator::Wait(const PendingOperation& pending, double timeout_s,
                          InterruptCheck interrupt_check) {
  if (pending.done()) return pending.status();
  const BlockedSection blocked(pending.monitor().blocked_clock());
  Deadline deadline(timeout_s);
  while (!pending.done()) {
    const auto left = deadline.Left();
    if (left.count() == 0) {
      return Status(StatusCode::kTimeout, Summarize(pending.operation()) + " was not done after " +
                                              std::to_string(timeout_s) +
                                              " s; it continues and can be waited for again");
    }
    pending.WaitFor(std::min(left, kSlice));
    if (!pending.done() && interrupt_check != nullptr && interrupt_check()) {
      return Status(StatusCode::kInterrupted, "a signal interrupted the wait");
    }
  }
  return pending.status();
}

void Communicator::Abort(const std::string& reason) {
  const Status status(StatusCode::kAborted,
                      "rank " + std::to_string(rank()) + " aborted: " + reason);
  if (failure_.Set(status)) lifeline_.Spread(status);
}

std::optional<std::string> Communicator::failure() const {
  if (!failure_.is_set()) return std::nullopt;
  return failure_.status().ToString();
}

}  // namespace sparkdl
