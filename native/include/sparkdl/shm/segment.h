// The shared memory of the ranks of one host, and its layout.
#ifndef SPARKDL_SHM_SEGMENT_H_
#define SPARKDL_SHM_SEGMENT_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "sparkdl/status.h"

namespace sparkdl {

// Data that one rank publishes to the others, in one cache line so that a small operation costs one
// cache miss per peer. Data of an operation has two entries, used alternately by the parity of the
// sequence number: an entry is overwritten two operations later, when all ranks have read it.
struct alignas(64) FlagLine {
  std::atomic<uint32_t> phase;     // number of the rank's synchronisations, wraps
  std::atomic<uint32_t> sleepers;  // threads that sleep on phase
  std::array<uint64_t, 2> digests;
  std::array<uint32_t, 2> verdicts;  // from the owner of lane 0: 1 if the hosts agree
  std::atomic<int32_t> core;         // core on which the rank was last seen, plus 1
  std::atomic<uint32_t> streaming;   // from local rank 0: see TileMovers
};
static_assert(sizeof(FlagLine) == 64);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Layout: one FlagLine per rank, 128 bytes apart because two lines are fetched together, then the
// slots of each rank. A zero-filled segment is ready to use.
class Segment {
 public:
  static constexpr size_t kSlotBytes = size_t{256} * 1024;
  // Enough that, when the lines of a slot are written again, they are no longer in the second-level
  // cache of the peers that read them, which would have to be asked for them. With half as many
  // slots, an allreduce of 1 MiB takes 1.6 times as long on Zen 4. With more slots, the slots
  // displace the arrays from the caches.
  static constexpr int kSlotsPerRank = 8;

  static size_t BytesFor(int local_size);

  // Maps the segment; the descriptor may be closed afterwards.
  static Result<std::shared_ptr<Segment>> Attach(int fd, int local_size);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  FlagLine& line(int local_rank) const;
  std::byte* slot(int local_rank, int which) const;

 private:
  Segment(std::byte* base, size_t bytes, int local_size)
      : base_(base), bytes_(bytes), local_size_(local_size) {}

  std::byte* base_;
  size_t bytes_;
  int local_size_;
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_SEGMENT_H_
