// The shared memory of the ranks of one host, and where everything lies in it.
#ifndef SPARKDL_SHM_SEGMENT_H_
#define SPARKDL_SHM_SEGMENT_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "sparkdl/status.h"

namespace sparkdl {

// What one rank tells the others, in one cache line so that a small operation costs one miss per
// peer. What belongs to an operation alternates by the parity of its sequence number: the next but
// one is only written when everybody has read this one.
struct alignas(64) FlagLine {
  std::atomic<uint32_t> phase;     // counts the rank's synchronisations, wraps
  std::atomic<uint32_t> sleepers;  // how many sleep on phase
  std::array<uint64_t, 2> digests;
  std::array<uint32_t, 2> verdicts;  // of the owner of lane 0: 1 if the hosts agree
  std::atomic<int32_t> core;         // that the rank was last seen on, and 1
  std::atomic<uint32_t> streaming;   // of local rank 0: see TileMovers
};
static_assert(sizeof(FlagLine) == 64);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Layout: one FlagLine per rank, 128 bytes apart (two lines are fetched together), then the slots
// of each rank. A zero-filled segment is ready to use.
class Segment {
 public:
  static constexpr size_t kSlotBytes = size_t{256} * 1024;
  // So many that a slot's lines are no longer in the second-level cache of the peers that read them
  // when they are written again, as these would have to be asked for them: with half as many, an
  // allreduce of 1 MiB takes 1.6 times as long on Zen 4. With more, the slots crowd out the arrays.
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
