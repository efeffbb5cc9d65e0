// Whether the cores that two ranks run on share a cache.
#ifndef SPARKDL_SHM_PEER_DISTANCE_H_
#define SPARKDL_SHM_PEER_DISTANCE_H_

#include <algorithm>

#include "sparkdl/deadline.h"

namespace sparkdl {

// The system cannot tell: a virtual machine's cores move about. The time tells that a cache line
// takes from one core to the other. With the reading of a fast clock these are 30 to 60 ns through
// a cache that they share, else 130 and more (AMD's Zen 4).
class PeerDistance {
 public:
  // Starts out near.
  bool is_far() const { return is_far_; }

  // A line was read in this time, the reading of the clock included, after the peer had written it.
  // One that was here already, fetched along with another or by a glance at it, tells nothing, but
  // looks as if the peer were near. So slow ones, which a near peer hardly has, count for more.
  void Note(Clock::duration took) {
    score_ = std::clamp(score_ + (took < kFar ? -1 : kWeightOfSlow), 0, kMost);
    if (score_ == 0) is_far_ = false;
    if (score_ == kMost) is_far_ = true;
  }

 private:
  static constexpr std::chrono::nanoseconds kFar{100};
  static constexpr int kWeightOfSlow = 3;
  // Eight slow lines make a near peer far, twice a dozen quick ones the far one near.
  static constexpr int kMost = 24;

  int score_ = 0;
  bool is_far_ = false;
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_PEER_DISTANCE_H_
