// Collectives' reduce.
#include <algorithm>

#include "collectives/lane_chunks.h"
#include "sparkdl/collectives/collectives.h"

namespace sparkdl {

Status Collectives::Reduce(const Operation& operation, OperationGuard& guard) {
  const Reduction reduction = ReductionOf(operation);
  if (!spans_hosts()) {
    return inside_.Reduce(topology_.local_rank_of(operation.root), operation.output,
                          operation.count, reduction, guard);
  }
  const size_t chunk = kLaneChunkBytes / reduction.kernels.accumulator_bytes * num_lanes();
  for (size_t done = 0; done < operation.count; done += chunk) {
    SPARKDL_RETURN_IF_ERROR(
        ReduceChunk(operation, {done, std::min(chunk, operation.count - done)}, reduction, guard));
  }
  return {};
}

Status Collectives::ReduceChunk(const Operation& operation, const Part& range,
                                const Reduction& reduction, OperationGuard& guard) {
  const ReduceKernels& kernels = reduction.kernels;
  const size_t element_bytes = kernels.element_bytes;
  std::byte* const data = operation.output + range.begin * element_bytes;
  const auto part_of = [&](size_t lane) {
    return PartOf(range.size, num_lanes(), lane, kUnitElements);
  };
  std::vector<ConstPieces> streams;
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    const Part part = part_of(lane);
    streams.push_back({{data + part.begin * element_bytes, part.size * element_bytes}});
  }
  const Part mine = part_of(static_cast<size_t>(topology_.local_rank()));
  ShmGroup::ReduceTarget target{.output = {}, .to_accumulators = true};
  Piece accumulators;
  if (lane_.has_value()) {
    const size_t bytes = mine.size * kernels.accumulator_bytes;
    accumulators = {Accumulators(bytes), bytes};
    target.output = {accumulators};
  }
  SPARKDL_RETURN_IF_ERROR(inside_.ReduceScatter(streams, target, reduction, guard));
  const int root_host = topology_.host_of(operation.root);
  if (lane_.has_value()) {
    SPARKDL_RETURN_IF_ERROR(lane_->Reduce({accumulators}, root_host, reduction, guard));
  }
  if (topology_.host() != root_host) return {};

  const bool is_root = topology_.rank() == operation.root;
  ConstPieces reduced;
  std::vector<std::byte> elements;
  if (lane_.has_value()) {
    std::byte* result = data + mine.begin * element_bytes;
    if (!is_root) {
      elements.resize(mine.size * element_bytes);
      result = elements.data();
    }
    kernels.finalize(result, accumulators.data, mine.size, reduction.finish);
    reduced = {{result, mine.size * element_bytes}};
  }
  std::vector<Pieces> destinations(static_cast<size_t>(inside_.size()));
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    const Part part = part_of(lane);
    destinations[lane] = {
        {is_root ? data + part.begin * element_bytes : nullptr, part.size * element_bytes}};
  }
  return inside_.Gather(reduced, destinations, guard);
}

}  // namespace sparkdl
