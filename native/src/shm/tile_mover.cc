#include "sparkdl/shm/tile_mover.h"

#include <algorithm>
#include <bit>

namespace sparkdl {

TileMover TileMovers::Begin(const Published& published, const Tile& tile) const {
  TileMover mover;
  if (tile.bytes <= kSmallest) return mover;
  const auto size_class = static_cast<size_t>(std::bit_width((tile.bytes - 1) / (2 * kSmallest)));
  mover.index_ =
      static_cast<size_t>(tile.traffic) * kNumSizes + std::min(kNumSizes - 1, size_class);
  const uint32_t streaming = published.load(std::memory_order_relaxed);
  if ((streaming >> mover.index_ & 1U) != 0) mover.stores_ = Stores::kStreaming;
  mover.is_timed_ = measures_ && (tile.goes_both_ways || !tile.is_first);
  if (!mover.is_timed_) return mover;
  mover.bytes_ = tile.bytes;
  mover.work_ = tile.work;
  mover.is_first_ = tile.is_first;
  mover.is_far_ = distance_.is_far();
  return mover;
}

void TileMovers::End(const TileMover& mover, Published& published) {
  if (!mover.is_timed_) return;
  const bool is_far = distance_.is_far();
  Choices& choices = choices_[is_far ? 1 : 0];
  if (is_far != is_for_far_) {
    is_for_far_ = is_far;
    TakeUp(choices, published);
  }
  StoreChoice& choice = choices[mover.index_];
  // A tile that began before the previous one ended may have been moved with stores that are no
  // longer current.
  if (mover.is_far_ != is_far || mover.stores_ != choice.current()) return;
  const auto seconds = std::chrono::duration<double>(mover.busy_).count();
  choice.Note(seconds / static_cast<double>(mover.bytes_), mover.work_);
  const uint32_t bit = uint32_t{1} << mover.index_;
  const bool streams = choice.current() == Stores::kStreaming;
  // The word shares its cache line with the flags on which the peers wait, so it is written only if
  // it changes, here and below.
  if (((published.load(std::memory_order_relaxed) & bit) != 0) == streams) return;
  if (streams) {
    published.fetch_or(bit, std::memory_order_relaxed);
  } else {
    published.fetch_and(~bit, std::memory_order_relaxed);
  }
}

void TileMovers::TakeUp(Choices& choices, Published& published) {
  uint32_t streaming = 0;
  for (size_t index = 0; index < choices.size(); ++index) {
    choices[index].Resume();
    if (choices[index].current() == Stores::kStreaming) streaming |= uint32_t{1} << index;
  }
  if (published.load(std::memory_order_relaxed) == streaming) return;
  published.store(streaming, std::memory_order_relaxed);
}

}  // namespace sparkdl
