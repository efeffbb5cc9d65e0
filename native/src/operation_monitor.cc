#include "sparkdl/operation_monitor.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace sparkdl {
namespace {

// Waits of at least this length are counted in every operation.
constexpr int64_t kLongWaitNs = 1000;

uint64_t Unsigned(int64_t duration) {
  return static_cast<uint64_t>(std::max<int64_t>(duration, 0));
}

}  // namespace

uint64_t OperationMonitor::BytesOfBlocks(const Operation& operation) const {
  if (operation.counts.empty()) return operation.bytes() * static_cast<uint64_t>(world_size_);
  return std::accumulate(operation.counts.begin(), operation.counts.end(), uint64_t{0}) *
         BytesOf(operation.dtype);
}

void OperationMonitor::BeginTimed(bool is_queued, OperationTimes& times) {
  times.begun = NowNs();
  if (is_queued) blocked_at_begin_ = blocked_.At(times.begun);
}

void OperationMonitor::FinishTimed(const Operation& operation, uint64_t sequence, bool is_queued,
                                   bool is_ok, OperationTimes& times) {
  KindCounters& counters = kinds_[static_cast<size_t>(operation.kind)];
  if (times.begun != 0) times.done = NowNs();
  if (is_ok) {
    Count(operation);
    AddTimes(counters, times, is_queued);
  } else {
    counters.num_failed.Add(1);
  }
  if (times.last >= 0 && times.waited() >= kLongWaitNs) {
    LatenessCounters& late = lateness_[static_cast<size_t>(times.last)];
    late.count.Add(1);
    late.waited.Add(Unsigned(times.waited()));
  }
  if (times.begun == 0) return;
  if (spans_hosts_ || is_recording_.load(std::memory_order_relaxed)) {
    Write(operation, sequence, is_ok, times);
  }
}

void OperationMonitor::AddTimes(KindCounters& counters, const OperationTimes& times,
                                bool is_queued) {
  const uint64_t waited = Unsigned(times.waited());
  const uint64_t took = times.begun == 0 ? waited : Unsigned(times.done - times.begun);
  // A long wait counts once, for the operation itself; the rest of its time counts also for the
  // operations that are not timed.
  const bool is_long = times.waited() >= kLongWaitNs;
  const uint64_t waiting = is_long ? waited : weight_ * waited;
  const uint64_t busy =
      is_long ? waited + weight_ * (took - std::min(took, waited)) : weight_ * took;
  counters.busy.Add(busy);
  counters.waiting.Add(waiting);
  if (!is_queued) {
    counters.exposed.Add(busy);
    return;
  }
  const uint64_t blocked = Unsigned(blocked_.At(times.done) - blocked_at_begin_);
  counters.exposed.Add(std::min(blocked, busy));
  counters.queued.Add(Unsigned(times.begun - times.queued));
}

void OperationMonitor::Write(const Operation& operation, uint64_t sequence, bool is_ok,
                             const OperationTimes& times) {
  const std::scoped_lock lock(mutex_);
  if (spans_hosts_) {
    arrivals_.push_back({sequence, times.arrived != 0 ? times.arrived : times.begun});
    if (arrivals_.size() > kNumArrivals) arrivals_.pop_front();
  }
  if (!is_recording_.load(std::memory_order_relaxed)) return;
  records_.records.push_back(
      {.sequence = sequence,
       .kind = operation.kind,
       .dtype = operation.dtype,
       .is_ok = is_ok,
       .bytes = HasBlocks(operation.kind) ? BytesOfBlocks(operation) : operation.bytes(),
       .times = times,
       .name = operation.name});
  if (records_.records.size() <= max_records_) return;
  records_.records.pop_front();
  ++records_.num_dropped;
}

std::vector<KindTotals> OperationMonitor::totals() const {
  std::vector<KindTotals> totals;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const KindCounters& counters = kinds_[kind];
    if (counters.count.value() + counters.num_failed.value() == 0) continue;
    totals.push_back({.kind = static_cast<OpKind>(kind),
                      .count = counters.count.value(),
                      .num_failed = counters.num_failed.value(),
                      .bytes = counters.bytes.value(),
                      .busy_ns = counters.busy.value(),
                      .waiting_ns = counters.waiting.value(),
                      .queued_ns = counters.queued.value(),
                      .exposed_ns = counters.exposed.value()});
  }
  return totals;
}

std::vector<Lateness> OperationMonitor::lateness() const {
  std::vector<Lateness> lateness;
  for (size_t rank = 0; rank < lateness_.size(); ++rank) {
    const uint64_t count = lateness_[rank].count.value();
    if (count == 0) continue;
    lateness.push_back({.rank = static_cast<int>(rank),
                        .count = count,
                        .waited_ns = lateness_[rank].waited.value()});
  }
  return lateness;
}

std::vector<Arrival> OperationMonitor::arrivals() const {
  const std::scoped_lock lock(mutex_);
  return {arrivals_.begin(), arrivals_.end()};
}

void OperationMonitor::StartRecording(size_t max_records) {
  const std::scoped_lock lock(mutex_);
  records_ = {};
  max_records_ = max_records;
  is_recording_.store(true, std::memory_order_relaxed);
}

void OperationMonitor::StopRecording() {
  const std::scoped_lock lock(mutex_);
  is_recording_.store(false, std::memory_order_relaxed);
}

OperationMonitor::Records OperationMonitor::TakeRecords() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(records_, {});
}

}  // namespace sparkdl
