// Collectives' allreduce and reduce_scatter.
#include <algorithm>

#include "sparkdl/collectives.h"
#include "sparkdl/copy.h"

namespace sparkdl {
namespace {

// A lane takes so much at a time: long enough to fill the network's pipe, short enough that the
// accumulators of a large tensor do not double the memory it takes.
constexpr size_t kLaneChunkBytes = size_t{16} * 1024 * 1024;

// Parts and blocks begin at multiples of so many elements, so that none shares a cache line.
constexpr size_t kUnitElements = 16;

}  // namespace

Status Collectives::AllReduce(const Operation& operation, OperationGuard& guard) {
  const ReduceKernels& kernels = *FindReduceKernels(operation.dtype, operation.reduce_op);
  if (!spans_hosts()) {
    return inside_.AllReduce(operation.output, operation.count, kernels,
                             static_cast<uint64_t>(topology_.world_size()), guard);
  }
  const size_t chunk = kLaneChunkBytes / kernels.accumulator_bytes * num_lanes();
  for (size_t done = 0; done < operation.count; done += chunk) {
    SPARKDL_RETURN_IF_ERROR(AllReduceChunk(operation.output + done * kernels.element_bytes,
                                           std::min(chunk, operation.count - done), kernels,
                                           guard));
  }
  return {};
}

Status Collectives::AllReduceChunk(std::byte* data, size_t count, const ReduceKernels& kernels,
                                   OperationGuard& guard) {
  const size_t unit = kUnitElements * kernels.element_bytes;
  const size_t bytes = count * kernels.element_bytes;
  std::vector<ConstPieces> streams;
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    const Part part = PartOf(bytes, num_lanes(), lane, unit);
    streams.push_back({{data + part.begin, part.size}});
  }
  ShmGroup::ReduceTarget target{.output = {}, .to_accumulators = true};
  Piece part;
  if (lane_.has_value()) {
    const Part mine = PartOf(bytes, num_lanes(), static_cast<size_t>(topology_.local_rank()), unit);
    part = {data + mine.begin, mine.size};
    const size_t accumulator_bytes = mine.size / kernels.element_bytes * kernels.accumulator_bytes;
    // Accumulators of the element type need no memory of their own.
    std::byte* accumulators = part.data;
    if (kernels.accumulator_bytes != kernels.element_bytes) {
      if (accumulators_.size() < accumulator_bytes) accumulators_.resize(accumulator_bytes);
      accumulators = accumulators_.data();
    }
    target.output = {{accumulators, accumulator_bytes}};
  }
  SPARKDL_RETURN_IF_ERROR(inside_.ReduceScatter(streams, target, kernels, guard));
  if (lane_.has_value()) {
    SPARKDL_RETURN_IF_ERROR(AllReduceOnLane(*lane_, part, target.output[0].data, kernels, guard));
  }
  return GatherLanes(data, bytes, unit, guard);
}

Status Collectives::AllReduceOnLane(Ring& lane, const Piece& part, std::byte* accumulators,
                                    const ReduceKernels& kernels, OperationGuard& guard) {
  const size_t count = part.bytes / kernels.element_bytes;
  std::vector<Pieces> partial;
  std::vector<Pieces> finished;
  Part mine;
  for (int host = 0; host < topology_.num_hosts(); ++host) {
    const Part block = PartOf(count, static_cast<size_t>(topology_.num_hosts()),
                              static_cast<size_t>(host), kUnitElements);
    if (host == topology_.host()) mine = block;
    partial.push_back({{accumulators + block.begin * kernels.accumulator_bytes,
                        block.size * kernels.accumulator_bytes}});
    finished.push_back(
        {{part.data + block.begin * kernels.element_bytes, block.size * kernels.element_bytes}});
  }
  SPARKDL_RETURN_IF_ERROR(lane.ReduceScatter(partial, kernels, guard));
  kernels.finalize(part.data + mine.begin * kernels.element_bytes,
                   accumulators + mine.begin * kernels.accumulator_bytes, mine.size,
                   static_cast<uint64_t>(topology_.world_size()));
  return lane.AllGather(finished, guard);
}

Status Collectives::ReduceScatter(const Operation& operation, OperationGuard& guard) {
  if (!spans_hosts()) return ReduceScatterInside(operation, guard);
  const ReduceKernels& kernels = *FindReduceKernels(operation.dtype, operation.reduce_op);
  const size_t per_block =
      kLaneChunkBytes / kernels.accumulator_bytes / static_cast<size_t>(topology_.world_size());
  const size_t chunk = std::max(per_block, kUnitElements) * num_lanes();
  for (size_t done = 0; done < operation.count; done += chunk) {
    SPARKDL_RETURN_IF_ERROR(ReduceScatterChunk(
        operation, {done, std::min(chunk, operation.count - done)}, kernels, guard));
  }
  return {};
}

Status Collectives::ReduceScatterInside(const Operation& operation, OperationGuard& guard) {
  const ReduceKernels& kernels = *FindReduceKernels(operation.dtype, operation.reduce_op);
  const size_t bytes = operation.bytes();
  std::vector<ConstPieces> streams;
  for (int rank = 0; rank < topology_.world_size(); ++rank) {
    streams.push_back({{operation.input + static_cast<size_t>(rank) * bytes, bytes}});
  }
  return inside_.ReduceScatter(streams,
                               {.output = {{operation.output, bytes}},
                                .to_accumulators = false,
                                .divisor = static_cast<uint64_t>(topology_.world_size())},
                               kernels, guard);
}

// Lane i carries part i of every rank's block, host by host.
Status Collectives::ReduceScatterChunk(const Operation& operation, const Part& range,
                                       const ReduceKernels& kernels, OperationGuard& guard) {
  const size_t element_bytes = kernels.element_bytes;
  const auto part_of = [&](size_t lane) {
    Part part = PartOf(range.size, num_lanes(), lane, kUnitElements);
    part.begin += range.begin;
    return part;
  };
  std::vector<ConstPieces> streams(num_lanes());
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    const Part part = part_of(lane);
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      for (const int rank : topology_.ranks_on(host)) {
        const size_t first = static_cast<size_t>(rank) * operation.count + part.begin;
        streams[lane].push_back(
            {operation.input + first * element_bytes, part.size * element_bytes});
      }
    }
  }
  ShmGroup::ReduceTarget target{.output = {}, .to_accumulators = true};
  const size_t my_part = part_of(static_cast<size_t>(topology_.local_rank())).size;
  if (lane_.has_value()) {
    const size_t bytes =
        my_part * static_cast<size_t>(topology_.world_size()) * kernels.accumulator_bytes;
    if (accumulators_.size() < bytes) accumulators_.resize(bytes);
    target.output = {{accumulators_.data(), bytes}};
  }
  SPARKDL_RETURN_IF_ERROR(inside_.ReduceScatter(streams, target, kernels, guard));

  // What this lane has reduced for each rank of this host, one after the other.
  std::vector<std::byte> reduced;
  if (lane_.has_value()) {
    SPARKDL_RETURN_IF_ERROR(ReduceScatterOnLane(*lane_, my_part, reduced, kernels, guard));
    const Part part = part_of(static_cast<size_t>(topology_.local_rank()));
    CopyBytes(
        operation.output + part.begin * element_bytes,
        reduced.data() + static_cast<size_t>(topology_.local_rank()) * part.size * element_bytes,
        part.size * element_bytes);
  }
  std::vector<Pieces> destinations(static_cast<size_t>(inside_.size()));
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    const Part part = part_of(lane);
    for (int other = 0; other < inside_.size(); ++other) {
      const bool is_mine = other == topology_.local_rank();
      destinations[lane].push_back(
          {is_mine ? operation.output + part.begin * element_bytes : nullptr,
           part.size * element_bytes});
    }
  }
  return inside_.Gather({{reduced.data(), reduced.size()}}, destinations, guard);
}

Status Collectives::ReduceScatterOnLane(Ring& lane, size_t block_elements,
                                        std::vector<std::byte>& reduced,
                                        const ReduceKernels& kernels, OperationGuard& guard) {
  std::vector<Pieces> blocks;
  size_t offset = 0;
  size_t my_offset = 0;
  for (int host = 0; host < topology_.num_hosts(); ++host) {
    if (host == topology_.host()) my_offset = offset;
    const size_t bytes =
        topology_.ranks_on(host).size() * block_elements * kernels.accumulator_bytes;
    blocks.push_back({{accumulators_.data() + offset, bytes}});
    offset += bytes;
  }
  SPARKDL_RETURN_IF_ERROR(lane.ReduceScatter(blocks, kernels, guard));
  const size_t count = static_cast<size_t>(inside_.size()) * block_elements;
  reduced.resize(count * kernels.element_bytes);
  kernels.finalize(reduced.data(), accumulators_.data() + my_offset, count,
                   static_cast<uint64_t>(topology_.world_size()));
  return {};
}

}  // namespace sparkdl
