// Sizes of the chunks into which reductions between hosts are divided.
#ifndef SPARKDL_RING_LANE_CHUNKS_H_
#define SPARKDL_RING_LANE_CHUNKS_H_

#include <cstddef>

namespace sparkdl {

// Bytes of accumulators that a lane takes at a time: enough to fill the network's pipe, and few
// enough that the accumulators of a large tensor do not double its memory.
inline constexpr size_t kLaneChunkBytes = size_t{16} * 1024 * 1024;

// The same where ranks share a host: while a lane carries one chunk, the host's ranks exchange the
// one before it and reduce the one after it. Of this work, only that for the first and the last
// chunk is not hidden.
inline constexpr size_t kOverlappedChunkBytes = size_t{4} * 1024 * 1024;

// Parts and blocks begin at multiples of this number of elements, so that none share a cache line.
inline constexpr size_t kUnitElements = 16;

}  // namespace sparkdl

#endif  // SPARKDL_RING_LANE_CHUNKS_H_
