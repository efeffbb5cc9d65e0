#include "sparkdl/shm/store_choice.h"

#include <algorithm>

namespace sparkdl {

void StoreChoice::Note(double cost, uint64_t work) {
  if (!IsOfInterest(work)) return;
  if (++num_in_block_ > 0) least_ = std::min(least_, cost);
  if (is_trial_) {
    if (HasTriedEnough()) EndTrial();
    return;
  }
  ++since_trial_;
  --until_trial_;
  if (num_in_block_ == kCounted) EndBlock();
}

void StoreChoice::Resume() {
  if (is_trial_) until_trial_ = kFirstTrialAfter;
  is_trial_ = false;
  BeginBlock(kSettling);
}

bool StoreChoice::IsOfInterest(uint64_t work) {
  if (work == work_) {
    num_strangers_ = 0;
    return true;
  }
  const bool is_first = best_cost_ == kUnknown && num_in_block_ == 0;
  if (!is_first && ++num_strangers_ < kStrangersUntilNews) return false;
  work_ = work;
  num_strangers_ = 0;
  is_trial_ = false;
  best_cost_ = kUnknown;
  expected_cost_ = 0.0;
  other_cost_ = 0.0;
  BeginBlock(0);
  return true;
}

bool StoreChoice::HasTriedEnough() const {
  return num_in_block_ >= kCounted ||
         (num_in_block_ >= kCountedAtLeast && least_ > best_cost_ * kHopeless);
}

void StoreChoice::EndBlock() {
  best_cost_ = least_;
  const bool has_risen = best_cost_ > expected_cost_ * kOtherLevel;
  // If the cached stores cost more now, but still far less than the others did, that says nothing
  // about the others.
  const bool is_near = best_ == Stores::kStreaming || best_cost_ * kHopeless > other_cost_;
  is_trial_ = until_trial_ <= 0 || (has_risen && is_near && since_trial_ >= kShortestInterval);
  BeginBlock(is_trial_ ? kSettling : 0);
}

void StoreChoice::EndTrial() {
  const double gain = best_ == Stores::kCached ? kGainOfStreaming : kGain;
  if (least_ < best_cost_ * gain) {
    best_ = Other(best_);
    other_cost_ = best_cost_;
    best_cost_ = least_;
    interval_ = kShortestInterval;
  } else {
    // A trial that ended early may have measured nothing but disturbances.
    other_cost_ = std::min(least_, best_cost_ * kMostTold);
    interval_ = std::min(2 * interval_, kLongestInterval);
  }
  expected_cost_ = best_cost_;
  is_trial_ = false;
  until_trial_ = interval_;
  since_trial_ = 0;
  BeginBlock(kSettling);
}

}  // namespace sparkdl
