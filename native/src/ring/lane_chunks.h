// How reductions across hosts are cut into pieces of work.
#ifndef SPARKDL_RING_LANE_CHUNKS_H_
#define SPARKDL_RING_LANE_CHUNKS_H_

#include <cstddef>

namespace sparkdl {

// A lane takes so much at a time: long enough to fill the network's pipe, short enough that the
// accumulators of a large tensor do not double the memory it takes.
inline constexpr size_t kLaneChunkBytes = size_t{16} * 1024 * 1024;

// The same where ranks share a host: while a lane carries one piece, the host's ranks exchange the
// one before it and reduce the one after it. Of the whole, that of the first and the last remains
// visible.
inline constexpr size_t kOverlappedChunkBytes = size_t{4} * 1024 * 1024;

// Parts and blocks begin at multiples of so many elements, so that none shares a cache line.
inline constexpr size_t kUnitElements = 16;

}  // namespace sparkdl

#endif  // SPARKDL_RING_LANE_CHUNKS_H_
