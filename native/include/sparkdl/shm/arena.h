// Memory for users' buffers that all ranks of a host map, so that collectives need not copy the
// buffers.
#ifndef SPARKDL_SHM_ARENA_H_
#define SPARKDL_SHM_ARENA_H_

#include <cstddef>
#include <memory>

#include "sparkdl/status.h"

namespace sparkdl {

// Each rank of the host has a part of the same size, and all ranks make the same allocations: a
// buffer lies at the same offset in the part of every rank.
class Arena {
 public:
  // Maps memory of local_size parts with part_bytes each. The descriptor may be closed afterwards.
  // number: distinguishes the arenas of one communicator; the same on all ranks.
  static Result<std::shared_ptr<const Arena>> Attach(int fd, size_t part_bytes, int local_rank,
                                                     int local_size, int number);

  // Size of one rank's part for this many bytes of buffers: whole huge pages.
  static size_t PartBytesFor(size_t bytes);

  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int number() const { return number_; }
  size_t part_bytes() const { return part_bytes_; }
  std::byte* part(int local_rank) const {
    return base_ + static_cast<size_t>(local_rank) * part_bytes_;
  }
  std::byte* own_part() const { return part(local_rank_); }

  // Whether these bytes lie in this rank's part.
  bool Holds(const std::byte* data, size_t bytes) const {
    return data >= own_part() && data + bytes <= own_part() + part_bytes_;
  }
  size_t OffsetOf(const std::byte* data) const { return static_cast<size_t>(data - own_part()); }

 private:
  Arena(std::byte* base, size_t part_bytes, int local_rank, int local_size, int number)
      : base_(base),
        part_bytes_(part_bytes),
        local_rank_(local_rank),
        local_size_(local_size),
        number_(number) {}

  std::byte* const base_;
  const size_t part_bytes_;
  const int local_rank_;
  const int local_size_;
  const int number_;
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_ARENA_H_
