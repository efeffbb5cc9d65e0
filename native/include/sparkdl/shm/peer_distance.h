// Whether the cores that two ranks run on share a cache.
#ifndef SPARKDL_SHM_PEER_DISTANCE_H_
#define SPARKDL_SHM_PEER_DISTANCE_H_

#include <algorithm>

#include "sparkdl/deadline.h"

namespace sparkdl {

// The system cannot tell, because the cores of a virtual machine are moved around. The time that a
// cache line takes from one core to the other can. With the reading of a fast clock it is 30 to 60
// ns through a shared cache, and 130 ns or more otherwise (AMD's Zen 4).
class PeerDistance {
 public:
  // Initially false.
  bool is_far() const { return is_far_; }

  // Notes how long it took to read a line that the peer had written, including the reading of the
  // clock. If the line was already in this core's cache, fetched together with another line or by
  // an earlier read, the time says nothing about the distance, but makes the peer look near. Slow
  // reads, which a near peer hardly ever causes, therefore have more weight.
  void Note(Clock::duration took) {
    score_ = std::clamp(score_ + (took < kFar ? -1 : kWeightOfSlow), 0, kMost);
    if (score_ == 0) is_far_ = false;
    if (score_ == kMost) is_far_ = true;
  }

 private:
  static constexpr std::chrono::nanoseconds kFar{100};
  static constexpr int kWeightOfSlow = 3;
  // Eight slow reads make a near peer far, and 24 fast ones make a far peer near.
  static constexpr int kMost = 24;

  int score_ = 0;
  bool is_far_ = false;
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_PEER_DISTANCE_H_
