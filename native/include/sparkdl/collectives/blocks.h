// Positions of the ranks' blocks in buffers that hold the blocks of all ranks.
#ifndef SPARKDL_RING_BLOCKS_H_
#define SPARKDL_RING_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sparkdl/pieces.h"

namespace sparkdl {

class Blocks {
 public:
  // counts: number of elements of each rank's block; empty if all blocks have `count`.
  Blocks(const std::vector<uint64_t>& counts, size_t count, size_t element_bytes, int world_size) {
    begins_.reserve(static_cast<size_t>(world_size) + 1);
    begins_.push_back(0);
    for (size_t rank = 0; rank < static_cast<size_t>(world_size); ++rank) {
      const size_t elements = counts.empty() ? count : counts[rank];
      begins_.push_back(begins_.back() + elements * element_bytes);
    }
  }

  size_t begin(int rank) const { return begins_[static_cast<size_t>(rank)]; }
  size_t bytes(int rank) const { return begins_[static_cast<size_t>(rank) + 1] - begin(rank); }
  size_t total() const { return begins_.back(); }

 private:
  std::vector<size_t> begins_;
};

// By rank, the stream of its blocks of several arrays. counts: number of elements of each rank's
// block of the first array, then of the second and so on.
template <typename Byte>
std::vector<std::vector<BasicPiece<Byte>>> BlocksOfGroup(
    const std::vector<BasicPiece<Byte>>& arrays, const std::vector<uint64_t>& counts,
    size_t element_bytes, int world_size) {
  std::vector<std::vector<BasicPiece<Byte>>> streams(static_cast<size_t>(world_size));
  auto count = counts.begin();
  for (const BasicPiece<Byte>& array : arrays) {
    Byte* next = array.data;
    for (std::vector<BasicPiece<Byte>>& stream : streams) {
      const size_t bytes = *count++ * element_bytes;
      stream.push_back({next, bytes});
      if (next != nullptr) next += bytes;
    }
  }
  return streams;
}

}  // namespace sparkdl

#endif  // SPARKDL_RING_BLOCKS_H_
