#include "collectives/lane_worker.h"

#include <pthread.h>

#include <csignal>
#include <exception>
#include <new>
#include <utility>

namespace sparkdl {

LaneWorker::LaneWorker(OperationGuard& guard)
    : guard_(guard), own_guard_(guard.ForHelper(stops_)), thread_([this] { Loop(); }) {}

LaneWorker::~LaneWorker() {
  {
    const std::scoped_lock lock(mutex_);
    stops_.store(true, std::memory_order_release);
  }
  change_.notify_all();
  thread_.join();
}

void LaneWorker::Submit(Work work) {
  {
    const std::scoped_lock lock(mutex_);
    queue_.push_back(std::move(work));
  }
  change_.notify_all();
}

Status LaneWorker::Await(size_t num_done) {
  std::unique_lock lock(mutex_);
  while (status_.ok() && num_done_ < num_done) {
    lock.unlock();
    SPARKDL_RETURN_IF_ERROR(guard_.Check());
    const auto slice = guard_.Slice();
    if (slice.count() == 0) return guard_.TimedOut();
    lock.lock();
    if (status_.ok() && num_done_ < num_done) change_.wait_for(lock, slice);
  }
  return status_;
}

void LaneWorker::Loop() {
  sigset_t all;
  sigfillset(&all);
  // Signals are left to the application's threads.
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::unique_lock lock(mutex_);
  while (status_.ok()) {
    change_.wait(lock, [&] { return stops_.load(std::memory_order_relaxed) || !queue_.empty(); });
    if (stops_.load(std::memory_order_relaxed)) return;
    const Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Status status = Do(work);
    lock.lock();
    status_ = std::move(status);
    ++num_done_;
    change_.notify_all();
  }
}

Status LaneWorker::Do(const Work& work) {
  try {
    return work(own_guard_);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kFailed, "out of memory in " + own_guard_.Summary());
  } catch (const std::exception& error) {
    return Status(StatusCode::kFailed, own_guard_.Summary() + " failed: " + error.what());
  }
}

}  // namespace sparkdl
