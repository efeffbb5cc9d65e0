// Whether the ranks of a host move data with ordinary or with streaming stores: what is faster.
#ifndef SPARKDL_STORE_CHOICE_H_
#define SPARKDL_STORE_CHOICE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "sparkdl/copy.h"
#include "sparkdl/deadline.h"

namespace sparkdl {

// One choice, made by measuring. Where two cores share their last cache, it is fastest to read what
// the other has just written from there; where they do not, that takes four times as long as to
// read it from memory. The system cannot tell which: a virtual machine's cores move about. So the
// stores that are not in use are tried now and then: for a few tiles, soon when the times change,
// and ever more seldom while the choice proves right.
class StoreChoice {
 public:
  // What the next tile is to be moved with.
  Stores current() const { return is_trial_ ? Other(best_) : best_; }

  // What such a tile cost, in seconds per byte.
  void Note(double cost);

 private:
  // After a change of stores all slots are written once before times mean anything.
  static constexpr int kSettling = 4;
  // The least cost of so many counts: whatever else the machine does can only add to it.
  static constexpr int kCounted = 6;
  static constexpr int kCountedAtLeast = 2;
  static constexpr int kFirstTrialAfter = 16;
  static constexpr int kShortestInterval = 256;
  static constexpr int kLongestInterval = 8192;
  static constexpr double kOtherLevel = 1.25;
  static constexpr double kGain = 0.95;
  static constexpr double kHopeless = 1.5;
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  static Stores Other(Stores stores) {
    return stores == Stores::kCached ? Stores::kStreaming : Stores::kCached;
  }
  bool HasTriedEnough() const {
    const int counted = num_in_block_ - kSettling;
    return counted >= kCounted || (counted >= kCountedAtLeast && least_ > best_cost_ * kHopeless);
  }
  void EndBlock();
  void EndTrial();

  Stores best_ = Stores::kCached;
  bool is_trial_ = false;
  int until_trial_ = kFirstTrialAfter;
  int interval_ = kShortestInterval;
  int since_trial_ = 0;
  int num_in_block_ = 0;
  double least_ = kUnknown;          // in this block
  double best_cost_ = kUnknown;      // in the last block with the best stores
  double expected_cost_ = kUnknown;  // of the best stores when they were last found to be so
};

// The choices for all kinds and sizes of tiles. Local rank 0 measures and publishes, all follow;
// whoever hears of a change late only has one more tile moved the other way.
class StoreChoices {
 public:
  enum class Traffic : uint8_t { kAllReduce, kReduce, kReduceScatter, kGather, kExchange };

  // What local rank 0 publishes: a bit for each choice that is in favour of streaming.
  using Published = std::atomic<uint32_t>;

  // One tile that is under way. Its time is taken; what the first of an operation waits for its
  // peers does not count, as they may have come late.
  class Tile {
   public:
    void Copy(void* destination, const void* source, size_t bytes) const {
      CopyBytes(destination, source, bytes, stores_);
    }
    // To be called before others may read what was copied.
    void Flush() const { FinishCopies(stores_); }
    void BeginWait() {
      Flush();
      if (is_timed_ && is_first_) busy_ += Clock::now() - start_;
    }
    void EndWait() {
      if (is_timed_ && is_first_) start_ = Clock::now();
    }

   private:
    friend class StoreChoices;

    size_t index_ = 0;
    size_t bytes_ = 0;
    Stores stores_ = Stores::kCached;
    bool is_timed_ = false;
    bool is_first_ = false;
    Clock::time_point start_;
    Clock::duration busy_{};
  };

  explicit StoreChoices(bool measures) : measures_(measures && kHasStreamingStores) {}

  // bytes: how many a rank moves at most, which is what times are compared by.
  Tile Begin(const Published& published, Traffic traffic, size_t bytes, bool is_first) const;
  void End(Tile& tile, Published& published);

 private:
  // By powers of two: up to 32 KiB, 64 KiB, ..., more than 256 KiB.
  static constexpr size_t kNumSizes = 5;
  static constexpr size_t kNumTraffics = 5;
  static_assert(kNumSizes * kNumTraffics <= 32);

  const bool measures_;
  std::array<StoreChoice, kNumSizes * kNumTraffics> choices_;
};

}  // namespace sparkdl

#endif  // SPARKDL_STORE_CHOICE_H_
