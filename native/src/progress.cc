// The progress thread of a communicator: runs queued operations, and serves the lifelines in
// between.
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>

#include "sparkdl/communicator.h"

namespace sparkdl {

std::shared_ptr<PendingOperation> Communicator::Submit(const Operation& operation,
                                                       double timeout_s) {
  auto pending = std::make_shared<PendingOperation>(operation, timeout_s, monitor_);
  {
    const std::scoped_lock lock(queue_mutex_);
    if (is_closing_.load(std::memory_order_acquire)) {
      pending->Finish(failure_.is_set()
                          ? failure_.status()
                          : Status(StatusCode::kFailed, "the communicator is closed"));
      return pending;
    }
    queue_.push_back(pending);
    num_pending_.fetch_add(1, std::memory_order_seq_cst);
  }
  WakeProgressThread();
  return pending;
}

void Communicator::WakeProgressThread() {
  if (!progress_sleeps_.load(std::memory_order_seq_cst)) return;
  const uint64_t one = 1;
  // Fails only on overflow, and then the thread is about to wake anyway.
  static_cast<void>(!::write(wake_fd_.get(), &one, sizeof(one)));
}

void Communicator::ProgressLoop() {
  sigset_t all;
  sigfillset(&all);
  // Signals are left to the application's threads.
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  while (!stops_.load(std::memory_order_acquire)) {
    if (!RunNextQueued()) {
      announcements_.WakeAll();
      SleepUntilNews();
    }
  }
  while (RunNextQueued()) {
  }
  announcements_.WakeAll();
}

bool Communicator::RunNextQueued() {
  if (num_pending_.load(std::memory_order_seq_cst) == 0 || !TryAcquireTurn()) return false;
  std::shared_ptr<PendingOperation> pending;
  {
    const std::scoped_lock lock(queue_mutex_);
    if (!queue_.empty()) {
      pending = std::move(queue_.front());
      queue_.pop_front();
    }
  }
  if (pending == nullptr) {
    turn_is_taken_.store(false, std::memory_order_seq_cst);
    return false;
  }
  announcements_.BeforeOperation(pending->operation().bytes());
  OperationTimes times;
  times.queued = pending->queued_ns();
  const Runner runner{.is_progress_thread = true, .announcements = &announcements_};
  Status status = Execute(pending->operation(), pending->timeout_s(), runner, times);
  // In this order: a thread that finds nothing pending may run an operation at once, and must find
  // the turn free.
  turn_is_taken_.store(false, std::memory_order_seq_cst);
  num_pending_.fetch_sub(1, std::memory_order_seq_cst);
  pending->Complete(std::move(status));
  announcements_.Add(std::move(pending));
  if (num_pending_.load(std::memory_order_seq_cst) == 0) announcements_.WakeAll();
  return true;
}

void Communicator::SleepUntilNews() {
  const auto lifelines = lifeline_.PollFds();
  pollfd polled[3] = {
      {wake_fd_.get(), POLLIN, 0}, {lifelines[0], POLLIN, 0}, {lifelines[1], POLLIN, 0}};
  progress_sleeps_.store(true, std::memory_order_seq_cst);
  // Work that was queued before the flag became visible woke no thread, so look once more.
  const bool has_work = stops_.load(std::memory_order_seq_cst) ||
                        (num_pending_.load(std::memory_order_seq_cst) != 0 &&
                         !turn_is_taken_.load(std::memory_order_seq_cst));
  const int ready = has_work ? 0 : ::poll(polled, 3, -1);
  progress_sleeps_.store(false, std::memory_order_seq_cst);
  if (ready <= 0) return;
  if (polled[0].revents != 0) {
    uint64_t count = 0;
    static_cast<void>(!::read(wake_fd_.get(), &count, sizeof(count)));
    // A caller that submits one operation usually submits more. If all cores are busy, this thread
    // was put on the caller's core: let the caller continue, because half-submitted queues make
    // ranks wait for each other. If a core is free, this returns at once.
    ::sched_yield();
  }
  if (polled[1].revents != 0 || polled[2].revents != 0) lifeline_.Service();
}

}  // namespace sparkdl
