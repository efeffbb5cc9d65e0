#include "sparkdl/store_choice.h"

#include <algorithm>

namespace sparkdl {

void StoreChoice::Note(double cost, uint64_t work) {
  if (!IsOfInterest(work)) return;
  ++num_in_block_;
  if (is_trial_) {
    if (num_in_block_ > kSettling) least_ = std::min(least_, cost);
    if (HasTriedEnough()) EndTrial();
    return;
  }
  ++since_trial_;
  --until_trial_;
  least_ = std::min(least_, cost);
  if (num_in_block_ == kCounted) EndBlock();
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
  expected_cost_ = kUnknown;
  BeginBlock();
  return true;
}

bool StoreChoice::HasTriedEnough() const {
  const int counted = num_in_block_ - kSettling;
  return counted >= kCounted || (counted >= kCountedAtLeast && least_ > best_cost_ * kHopeless);
}

void StoreChoice::EndBlock() {
  best_cost_ = least_;
  BeginBlock();
  const bool is_expected =
      best_cost_ < expected_cost_ * kOtherLevel && best_cost_ * kOtherLevel > expected_cost_;
  is_trial_ = until_trial_ <= 0 || (!is_expected && since_trial_ >= kShortestInterval);
}

void StoreChoice::EndTrial() {
  if (least_ < best_cost_ * kGain) {
    best_ = Other(best_);
    best_cost_ = least_;
    interval_ = kShortestInterval;
  } else {
    interval_ = std::min(2 * interval_, kLongestInterval);
  }
  expected_cost_ = best_cost_;
  is_trial_ = false;
  until_trial_ = interval_;
  since_trial_ = 0;
  BeginBlock();
}

}  // namespace sparkdl
