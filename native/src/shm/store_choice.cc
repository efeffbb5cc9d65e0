#include "sparkdl/store_choice.h"

#include <algorithm>
#include <bit>

namespace sparkdl {
namespace {

// 0 for up to 32 KiB, 1 for up to 64 KiB, and so on.
size_t SizeClassOf(size_t bytes, size_t num_classes) {
  constexpr size_t kSmallest = size_t{32} * 1024;
  const size_t beyond = bytes == 0 ? 0 : (bytes - 1) / kSmallest;
  return std::min(num_classes - 1, static_cast<size_t>(std::bit_width(beyond)));
}

}  // namespace

void StoreChoice::Note(double cost) {
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

void StoreChoice::EndBlock() {
  best_cost_ = least_;
  least_ = kUnknown;
  num_in_block_ = 0;
  const bool is_expected =
      best_cost_ < expected_cost_ * kOtherLevel && best_cost_ * kOtherLevel > expected_cost_;
  const int soon = std::max(kShortestInterval, interval_ / 8);
  is_trial_ = until_trial_ <= 0 || (!is_expected && since_trial_ >= soon);
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
  num_in_block_ = 0;
  least_ = kUnknown;
}

StoreChoices::Tile StoreChoices::Begin(const Published& published, Traffic traffic, size_t bytes,
                                       bool is_first) const {
  Tile tile;
  tile.bytes_ = bytes;
  tile.index_ = static_cast<size_t>(traffic) * kNumSizes + SizeClassOf(bytes, kNumSizes);
  const uint32_t streaming = published.load(std::memory_order_relaxed);
  if ((streaming >> tile.index_ & 1U) != 0) tile.stores_ = Stores::kStreaming;
  tile.is_timed_ = measures_ && bytes > 0;
  tile.is_first_ = is_first;
  if (tile.is_timed_) tile.start_ = Clock::now();
  return tile;
}

void StoreChoices::End(Tile& tile, Published& published) {
  tile.Flush();
  if (!tile.is_timed_) return;
  tile.busy_ += Clock::now() - tile.start_;
  StoreChoice& choice = choices_[tile.index_];
  const auto seconds = std::chrono::duration<double>(tile.busy_).count();
  choice.Note(seconds / static_cast<double>(tile.bytes_));
  if (choice.current() == tile.stores_) return;
  published.fetch_xor(uint32_t{1} << tile.index_, std::memory_order_relaxed);
}

}  // namespace sparkdl
