// When one operation did what.
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

// The edges of an operation; 0 where nobody looked at the clock. A rank that waits for nobody has
// neither `arrived` nor `ready`.
struct OperationTimes {
  int64_t queued = 0;   // was handed over to the progress thread
  int64_t begun = 0;    // its turn came
  int64_t arrived = 0;  // had to wait for other ranks
  int64_t ready = 0;    // all ranks were there, and agreed
  int64_t done = 0;
  int last = -1;  // the rank that was waited for last, where that is known

  int64_t waited() const { return ready == 0 ? 0 : ready - arrived; }
};

// What is written down of one operation.
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
