// Choice between ordinary and streaming stores for moving data between the ranks of a host.
#ifndef SPARKDL_SHM_STORE_CHOICE_H_
#define SPARKDL_SHM_STORE_CHOICE_H_

#include <cstdint>
#include <limits>

#include "sparkdl/copy.h"
#include "sparkdl/shm/segment.h"

namespace sparkdl {

// One choice, made by measuring. If two cores share their last-level cache, it is fastest to read
// what the other core has just written from that cache. If they do not, this may take four times as
// long as reading it from memory (AMD's Zen 4). The system cannot tell which is the case, because
// the cores of a virtual machine are moved around. The stores that are not in use are therefore
// tried now and then for a few tiles: soon if times rise to a level at which the others could be
// better, and ever more rarely while the choice proves right.
class StoreChoice {
 public:
  // The kind of stores for the next tile.
  Stores current() const { return is_trial_ ? Other(best_) : best_; }

  // Notes the time of a tile that was moved with current(), in seconds per byte. work: identifies
  // what was done with the tile, because only times of the same work are comparable. Times of other
  // work are ignored, unless kStrangersUntilNews tiles in a row are of other work.
  void Note(double cost, uint64_t work);

  // To be called when the choice was not used for a while: times noted before are not comparable
  // with those that follow.
  void Resume();

 private:
  // After a change of stores, times mean something only once all slots have been written.
  static constexpr int kSettling = Segment::kSlotsPerRank;
  // Times of a block. The least one counts: other activity on the machine can only add to it.
  static constexpr int kCounted = 6;
  static constexpr int kCountedAtLeast = 2;
  static constexpr int kFirstTrialAfter = 16;  // first trial, or one broken off
  // A trial may take fourteen tiles twice as long; at this interval that costs one or two percent.
  static constexpr int kShortestInterval = 1024;
  static constexpr int kLongestInterval = 8192;
  static constexpr double kOtherLevel = 1.25;
  static constexpr double kGain = 0.9;
  // If the cores come to share a cache again, streaming stores cost up to twice as much as the
  // others (Zen 5): the gain must be worth that risk.
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
  uint64_t work_ = 0;            // work whose times count
  int num_strangers_ = 0;        // tiles of other work in a row
  int num_in_block_ = 0;         // tiles that count; negative while tiles settle
  double least_ = kUnknown;      // least cost in this block
  double best_cost_ = kUnknown;  // of the last block with the best stores
  double expected_cost_ = 0.0;   // of the best stores at the end of the last trial
  double other_cost_ = 0.0;      // of the other stores at that time
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_STORE_CHOICE_H_
