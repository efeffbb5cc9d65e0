// Whether the ranks of a host move data with ordinary or with streaming stores: what is faster.
#ifndef SPARKDL_SHM_STORE_CHOICE_H_
#define SPARKDL_SHM_STORE_CHOICE_H_

#include <cstdint>
#include <limits>

#include "sparkdl/copy.h"
#include "sparkdl/shm/segment.h"

namespace sparkdl {

// One choice, made by measuring. Where two cores share their last cache, it is fastest to read what
// the other has just written from there; where they do not, that may take four times as long as to
// read it from memory (AMD's Zen 4). The system cannot tell which: a virtual machine's cores move
// about. So the stores that are not in use are tried now and then: for a few tiles, soon when times
// rise to where the others could be the better ones, and ever more seldom while the choice proves
// right.
class StoreChoice {
 public:
  // What the next tile is to be moved with.
  Stores current() const { return is_trial_ ? Other(best_) : best_; }

  // What a tile moved with current() took, in seconds per byte. work: says what was done with the
  // tile, as only times of the same work can be compared; those of other work are left out, unless
  // there is no other any more.
  void Note(double cost, uint64_t work);

  // To be called when the choice was left alone for a while: what was counted before does not go
  // with what comes now.
  void Resume();

 private:
  // After a change of stores all slots are written once before times mean anything.
  static constexpr int kSettling = Segment::kSlotsPerRank;
  // The least cost of so many counts: whatever else the machine does can only add to it.
  static constexpr int kCounted = 6;
  static constexpr int kCountedAtLeast = 2;
  static constexpr int kFirstTrialAfter = 16;  // the very first, and one that was broken off
  // A trial may take fourteen tiles twice as long: so seldom, that costs one or two percent.
  static constexpr int kShortestInterval = 1024;
  static constexpr int kLongestInterval = 8192;
  static constexpr double kOtherLevel = 1.25;
  static constexpr double kGain = 0.9;
  // Where the cores come to share a cache again, streaming stores cost up to twice what the others
  // do (Zen 5): they must be worth that risk.
  static constexpr double kGainOfStreaming = 0.75;
  static constexpr double kHopeless = 1.5;
  static constexpr double kMostTold = 3.0;
  static constexpr int kStrangersUntilNews = 32;
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  static Stores Other(Stores stores) {
    return stores == Stores::kCached ? Stores::kStreaming : Stores::kCached;
  }
  bool IsOfInterest(uint64_t work);
  bool HasTriedEnough() const;
  void EndBlock();
  void EndTrial();
  void BeginBlock(int settling) {
    num_in_block_ = -settling;
    least_ = kUnknown;
  }

  Stores best_ = Stores::kCached;
  bool is_trial_ = false;
  int until_trial_ = kFirstTrialAfter;
  int interval_ = kShortestInterval;
  int since_trial_ = 0;
  uint64_t work_ = 0;            // whose times count
  int num_strangers_ = 0;        // tiles of other work in a row
  int num_in_block_ = 0;         // that count; below zero, so many are yet to settle
  double least_ = kUnknown;      // in this block
  double best_cost_ = kUnknown;  // in the last block with the best stores
  double expected_cost_ = 0.0;   // of the best stores when they were last found to be so
  double other_cost_ = 0.0;      // of the others then
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_STORE_CHOICE_H_
