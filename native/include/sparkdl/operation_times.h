// Times of the stages of one operation.
#ifndef SPARKDL_OPERATION_TIMES_H_
#define SPARKDL_OPERATION_TIMES_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "sparkdl/operation.h"

namespace sparkdl {

// Nanoseconds of the steady clock, which is also Python's time.monotonic_ns().
inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Times of the stages of an operation; 0 if not measured. `arrived` and `ready` are 0 if the rank
// did not wait for other ranks.
struct OperationTimes {
  int64_t queued = 0;   // submitted to the progress thread
  int64_t begun = 0;    // its turn came
  int64_t arrived = 0;  // began to wait for other ranks
  int64_t ready = 0;    // all ranks had joined, and agreed
  int64_t done = 0;
  int last = -1;  // rank that was waited for last; -1 if not known

  int64_t waited() const { return ready == 0 ? 0 : ready - arrived; }
};

// Record of one operation.
struct OperationRecord {
  uint64_t sequence = 0;
  OpKind kind = OpKind::kBarrier;
  Dtype dtype = Dtype::kUint8;
  bool is_ok = true;
  uint64_t bytes = 0;
  OperationTimes times;
  std::string name;
};

}  // namespace sparkdl

#endif  // SPARKDL_OPERATION_TIMES_H_
