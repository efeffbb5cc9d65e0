// Measurements of a communicator's operations: totals by kind, which ranks came last, records of
// single operations, stalls.
#ifndef SPARKDL_OPERATION_MONITOR_H_
#define SPARKDL_OPERATION_MONITOR_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "sparkdl/blocked_clock.h"
#include "sparkdl/operation.h"
#include "sparkdl/operation_times.h"
#include "sparkdl/stall_board.h"

namespace sparkdl {

// Totals of the operations of one kind that succeeded; num_failed counts the failed ones. Times in
// nanoseconds.
struct KindTotals {
  OpKind kind = OpKind::kBarrier;
  uint64_t count = 0;
  uint64_t num_failed = 0;
  uint64_t bytes = 0;       // of whole buffers, or of all ranks' blocks, as nccl-tests counts them
  uint64_t busy_ns = 0;     // from `begun` to `done`
  uint64_t waiting_ns = 0;  // part of busy_ns: waiting for other ranks to join
  uint64_t queued_ns = 0;   // before busy_ns: waiting in the queue
  uint64_t exposed_ns = 0;  // part of busy_ns: while a thread of the caller was blocked
};

// Number of operations in which one rank was the last that this rank waited for, and the total
// waiting time.
struct Lateness {
  int rank = 0;
  uint64_t count = 0;
  uint64_t waited_ns = 0;
};

struct Arrival {
  uint64_t sequence = 0;
  int64_t time_ns = 0;
};

// Shared by the communicator and the readers of the measurements; outlives the communicator. Only
// the one thread that runs an operation may call Begin and Finish;
// all other methods are thread-safe.
//
// Reading the clock twice takes as long as a tenth of a small operation. Of the operations that are
// small, stay within their host and run on the caller's thread, only the first kNumTimed of a kind
// are therefore timed, and then one in kSampling, whose time counts for as many. Counts and bytes
// are exact nevertheless, as are waits of more than a microsecond. While operations are recorded,
// every operation is timed.
class OperationMonitor {
 public:
  static constexpr uint64_t kNumTimed = 256;
  static constexpr uint64_t kSampling = 16;
  static constexpr size_t kSmallBytes = size_t{64} * 1024;
  static constexpr size_t kNumArrivals = 1024;

  OperationMonitor(int world_size, bool spans_hosts, const StallOptions& stalls)
      : world_size_(world_size),
        spans_hosts_(spans_hosts),
        lateness_(static_cast<size_t>(world_size)),
        stalls_(stalls) {}

  // is_queued: whether the progress thread runs the operation.
  void Begin(const Operation& operation, bool is_queued, OperationTimes& times) {
    weight_ = WeightOf(operation, is_queued);
    if (weight_ != 0) BeginTimed(is_queued, times);
  }
  void Finish(const Operation& operation, uint64_t sequence, bool is_queued, bool is_ok,
              OperationTimes& times) {
    if (times.begun != 0 || times.ready != 0 || !is_ok) {
      FinishTimed(operation, sequence, is_queued, is_ok, times);
    } else {
      Count(operation);
    }
  }

  // Totals of the kinds of operations that have been called.
  std::vector<KindTotals> totals() const;
  // Lateness of the ranks that this rank waited for; known only among the ranks of one host.
  std::vector<Lateness> lateness() const;
  // Times at which this rank joined the latest operations, if the communicator spans hosts.
  std::vector<Arrival> arrivals() const;

  // Begins to record operations; the latest max_records are kept until they are taken.
  void StartRecording(size_t max_records);
  void StopRecording();
  struct Records {
    std::deque<OperationRecord> records;
    uint64_t num_dropped = 0;
  };
  Records TakeRecords();

  BlockedClock& blocked_clock() { return blocked_; }
  StallBoard& stalls() { return stalls_; }

 private:
  // A counter that only one thread writes at a time, so that additions need not be atomic.
  class Counter {
   public:
    void Add(uint64_t amount) { value_.store(value() + amount, std::memory_order_relaxed); }
    uint64_t value() const { return value_.load(std::memory_order_relaxed); }

   private:
    std::atomic<uint64_t> value_{0};
  };
  struct KindCounters {
    Counter count, num_failed, bytes, busy, waiting, queued, exposed;
  };
  struct LatenessCounters {
    Counter count, waited;
  };

  // Number of operations for which the time of this one counts; 0 if it is not timed.
  uint64_t WeightOf(const Operation& operation, bool is_queued) const {
    if (is_queued || spans_hosts_ || operation.bytes() > kSmallBytes ||
        is_recording_.load(std::memory_order_relaxed)) {
      return 1;
    }
    const uint64_t count = kinds_[static_cast<size_t>(operation.kind)].count.value();
    if (count < kNumTimed) return 1;
    // Scrambled (Fibonacci hashing), because programs repeat the same operations periodically.
    return (count * 0x9e3779b97f4a7c15U) >> 60 == 0 ? kSampling : 0;
  }
  void Count(const Operation& operation) {
    KindCounters& counters = kinds_[static_cast<size_t>(operation.kind)];
    counters.count.Add(1);
    counters.bytes.Add(HasBlocks(operation.kind) ? BytesOfBlocks(operation) : operation.bytes());
  }
  void BeginTimed(bool is_queued, OperationTimes& times);
  void FinishTimed(const Operation& operation, uint64_t sequence, bool is_queued, bool is_ok,
                   OperationTimes& times);
  void AddTimes(KindCounters& counters, const OperationTimes& times, bool is_queued);
  void Write(const Operation& operation, uint64_t sequence, bool is_ok,
             const OperationTimes& times);
  uint64_t BytesOfBlocks(const Operation& operation) const;

  const int world_size_;
  const bool spans_hosts_;
  std::array<KindCounters, kNumOpKinds> kinds_;
  std::vector<LatenessCounters> lateness_;
  BlockedClock blocked_;
  uint64_t weight_ = 1;  // used only by the thread that runs an operation, like the next
  int64_t blocked_at_begin_ = 0;
  StallBoard stalls_;

  std::atomic<bool> is_recording_{false};
  mutable std::mutex mutex_;
  std::deque<Arrival> arrivals_;  // guarded by mutex_, like all below
  Records records_;
  size_t max_records_ = 0;
};

}  // namespace sparkdl

#endif  // SPARKDL_OPERATION_MONITOR_H_
