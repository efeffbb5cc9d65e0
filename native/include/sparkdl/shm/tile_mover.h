// Moving tiles between the ranks of a host with the stores that prove faster.
#ifndef SPARKDL_SHM_TILE_MOVER_H_
#define SPARKDL_SHM_TILE_MOVER_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "sparkdl/copy.h"
#include "sparkdl/deadline.h"
#include "sparkdl/shm/peer_distance.h"
#include "sparkdl/shm/store_choice.h"

namespace sparkdl {

// One tile that is being moved. Its time, if it is measured, runs from Start() to Stop(). The first
// tile of an operation excludes the wait for the peers, which may have come late.
class TileMover {
 public:
  void Copy(void* destination, const void* source, size_t bytes) const {
    CopyBytes(destination, source, bytes, stores_);
  }
  // Must be called before others may read the copied data.
  void Flush() const { FinishCopies(stores_); }
  void BeginWait() {
    Flush();
    if (is_first_) Stop();
  }
  void EndWait() {
    if (is_first_) Start();
  }
  void Start() {
    if (is_timed_) start_ = Clock::now();
  }
  void Stop() {
    if (is_timed_) busy_ += Clock::now() - start_;
  }
  // Stop() and the other's Start() with one reading of the clock, which takes a two-hundredth of
  // the time of a tile.
  void HandOverTo(TileMover& other) {
    if (!is_timed_ && !other.is_timed_) return;
    const auto now = Clock::now();
    if (is_timed_) busy_ += now - start_;
    if (other.is_timed_) other.start_ = now;
  }
  Stores stores() const { return stores_; }

 private:
  friend class TileMovers;

  size_t index_ = 0;
  size_t bytes_ = 0;
  uint64_t work_ = 0;
  Stores stores_ = Stores::kCached;
  bool is_timed_ = false;
  bool is_first_ = false;
  bool is_far_ = false;
  Clock::time_point start_;
  Clock::duration busy_{};
};

// Makes the choices for all kinds and sizes of tiles, separately for near and far peers. Local rank
// 0 measures and publishes, and all ranks follow. A rank that learns of a change late only moves
// some more tiles with the other stores.
class TileMovers {
 public:
  enum class Traffic : uint8_t { kAllReduce, kReduce, kReduceScatter, kGather, kExchange };

  struct Tile {
    Traffic traffic = Traffic::kAllReduce;
    size_t bytes = 0;      // most bytes that a rank moves; times are compared per byte
    uint64_t work = 0;     // see StoreChoice
    bool is_first = true;  // the first tile of its operation
    // Whether this rank both publishes and fetches. A rank that does only one of them does not see
    // how long the other part takes on its peers, unless it waits for them in the next tile.
    bool goes_both_ways = true;
  };

  // For smaller tiles, measuring the time and the peers' distance would take more than a twentieth
  // of the tile's time.
  static constexpr size_t kSmallest = size_t{8} * 1024;

  // Published by local rank 0: one bit per choice, set for streaming stores.
  using Published = std::atomic<uint32_t>;

  explicit TileMovers(bool measures) : measures_(measures && kHasStreamingStores) {}

  // Where to note the distance of local rank 1 while this tile is being moved; null if measuring it
  // is not worth the time.
  PeerDistance* DistanceDuring(const TileMover& mover) {
    return mover.is_timed_ ? &distance_ : nullptr;
  }

  // Does not start the tile's time.
  TileMover Begin(const Published& published, const Tile& tile) const;
  // The tile's time must have been stopped.
  void End(const TileMover& mover, Published& published);

 private:
  static constexpr size_t kNumSizes = 6;  // up to 16 KiB, 32 KiB, ..., more than 256 KiB
  static constexpr size_t kNumTraffics = 5;
  static_assert(kNumSizes * kNumTraffics <= 32);

  using Choices = std::array<StoreChoice, kNumSizes * kNumTraffics>;

  void TakeUp(Choices& choices, Published& published);

  const bool measures_;
  PeerDistance distance_;
  bool is_for_far_ = false;  // whether the choices for far peers are published
  std::array<Choices, 2> choices_;
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_TILE_MOVER_H_
