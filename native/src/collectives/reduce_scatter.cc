// Collectives' reduce_scatter.
#include <algorithm>

#include "collectives/lane_chunks.h"
#include "sparkdl/collectives/collectives.h"
#include "sparkdl/copy.h"

namespace sparkdl {

Status Collectives::ReduceScatter(const Operation& operation, OperationGuard& guard) {
  const Reduction reduction = ReductionOf(operation);
  const std::vector<ConstPieces> blocks =
      StreamsOf(operation, operation.input, operation.group_input);
  const size_t own_bytes = TotalBytes(blocks[static_cast<size_t>(topology_.rank())]);
  const Pieces output =
      operation.group.empty() ? Pieces{{operation.output, own_bytes}} : operation.group;
  if (!spans_hosts()) {
    return inside_.ReduceScatter(blocks, {.output = output, .to_accumulators = false}, reduction,
                                 guard);
  }
  size_t longest = 0;
  for (const ConstPieces& block : blocks) {
    longest = std::max(longest, TotalBytes(block) / reduction.kernels.element_bytes);
  }
  const size_t per_block = kLaneChunkBytes / reduction.kernels.accumulator_bytes /
                           static_cast<size_t>(topology_.world_size());
  const size_t chunk = std::max(per_block, kUnitElements) * num_lanes();
  for (size_t done = 0; done < longest; done += chunk) {
    SPARKDL_RETURN_IF_ERROR(ReduceScatterChunk(blocks, output, {done, chunk}, reduction, guard));
  }
  return {};
}

// Reduces the elements in `range` of every rank's block, as far as the block has them. Lane i
// carries part i of each, ordered by host.
Status Collectives::ReduceScatterChunk(const std::vector<ConstPieces>& blocks, const Pieces& output,
                                       const Part& range, const Reduction& reduction,
                                       OperationGuard& guard) {
  const ReduceKernels& kernels = reduction.kernels;
  const size_t element_bytes = kernels.element_bytes;
  // Part of the rank's block, in elements.
  const auto part_of = [&](size_t lane, int rank) {
    const size_t count = TotalBytes(blocks[static_cast<size_t>(rank)]) / element_bytes;
    const size_t begin = std::min(range.begin, count);
    Part part = PartOf(std::min(range.size, count - begin), num_lanes(), lane, kUnitElements);
    part.begin += begin;
    return part;
  };
  std::vector<ConstPieces> streams(num_lanes());
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      for (const int rank : topology_.ranks_on(host)) {
        const Part part = part_of(lane, rank);
        Append(streams[lane], Slice(blocks[static_cast<size_t>(rank)], part.begin * element_bytes,
                                    part.size * element_bytes));
      }
    }
  }
  const auto my_lane = static_cast<size_t>(topology_.local_rank());
  ShmGroup::ReduceTarget target{.output = {}, .to_accumulators = true};
  if (lane_.has_value()) {
    const size_t bytes = TotalBytes(streams[my_lane]) / element_bytes * kernels.accumulator_bytes;
    target.output = {{Accumulators(bytes), bytes}};
  }
  SPARKDL_RETURN_IF_ERROR(inside_.ReduceScatter(streams, target, reduction, guard));

  // The elements that this lane has reduced for each rank of this host, one rank after the other.
  std::vector<std::byte> reduced;
  if (lane_.has_value()) {
    std::vector<Pieces> partial;
    size_t offset = 0;
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      size_t count = 0;
      for (const int rank : topology_.ranks_on(host)) count += part_of(my_lane, rank).size;
      partial.push_back({{target.output[0].data + offset, count * kernels.accumulator_bytes}});
      offset += count * kernels.accumulator_bytes;
    }
    SPARKDL_RETURN_IF_ERROR(lane_->ReduceScatter(partial, reduction, guard));
    const Piece mine = partial[static_cast<size_t>(topology_.host())][0];
    const size_t count = mine.bytes / kernels.accumulator_bytes;
    reduced.resize(count * element_bytes);
    kernels.finalize(reduced.data(), mine.data, count, reduction.finish);
  }
  std::vector<Pieces> destinations(static_cast<size_t>(inside_.size()));
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    size_t offset = 0;
    for (const int rank : topology_.local_ranks()) {
      const Part part = part_of(lane, rank);
      const size_t bytes = part.size * element_bytes;
      if (rank != topology_.rank()) {
        destinations[lane].push_back({nullptr, bytes});
        offset += bytes;
        continue;
      }
      for (const Piece& place : Slice(output, part.begin * element_bytes, bytes)) {
        destinations[lane].push_back(place);
        if (owns_lane(lane)) CopyBytes(place.data, reduced.data() + offset, place.bytes);
        offset += place.bytes;
      }
    }
  }
  return inside_.Gather({{reduced.data(), reduced.size()}}, destinations, guard);
}

}  // namespace sparkdl
