// Collectives' allreduce.
#include <algorithm>

#include "collectives/lane_chunks.h"
#include "collectives/lane_worker.h"
#include "sparkdl/collectives/collectives.h"

namespace sparkdl {
namespace {

// Finishes contiguous accumulators into elements that lie in pieces.
void Finalize(const Reduction& reduction, const Pieces& destination,
              const std::byte* accumulators) {
  for (const Piece& piece : destination) {
    const size_t count = piece.bytes / reduction.kernels.element_bytes;
    reduction.kernels.finalize(piece.data, accumulators, count, reduction.finish);
    accumulators += count * reduction.kernels.accumulator_bytes;
  }
}

}  // namespace

Status Collectives::AllReduce(const Operation& operation, OperationGuard& guard) {
  const Reduction reduction = ReductionOf(operation);
  const size_t element_bytes = reduction.kernels.element_bytes;
  if (!spans_hosts()) {
    if (operation.arena != nullptr) {
      return inside_.AllReduceInArena(*operation.arena, ArraysOf(operation), reduction, guard);
    }
    if (operation.group.empty()) {
      return inside_.AllReduce(operation.output, operation.count, reduction, guard);
    }
    // In shared memory, reducing each array separately costs a synchronisation or two per array,
    // which is less than a copy, and a small array stays in the cache.
    for (const Piece& piece : operation.group) {
      SPARKDL_RETURN_IF_ERROR(
          inside_.AllReduce(piece.data, piece.bytes / element_bytes, reduction, guard));
    }
    return {};
  }
  return AllReduceAcross(ArraysOf(operation), reduction, guard);
}

// A chunk of the data on its way between this host's ranks and its lane.
struct Collectives::LaneChunk {
  size_t number = 0;
  Pieces data;
  Pieces part;  // the part of data that this rank's lane carries
  std::byte* accumulators = nullptr;
};

Status Collectives::AllReduceAcross(const Pieces& data, const Reduction& reduction,
                                    OperationGuard& guard) {
  const ReduceKernels& kernels = reduction.kernels;
  const size_t unit = kUnitElements * kernels.element_bytes;
  const size_t bytes = TotalBytes(data);
  // All hosts must use the same chunk size.
  const bool overlaps = topology_.world_size() > topology_.num_hosts();
  const size_t chunk_bytes = (overlaps ? kOverlappedChunkBytes : kLaneChunkBytes) /
                             kernels.accumulator_bytes * kernels.element_bytes * num_lanes();
  if (bytes == 0) return {};
  std::optional<LaneWorker> worker;
  if (inside_.size() > 1 && lane_.has_value() && bytes > chunk_bytes) worker.emplace(guard);
  LaneChunk previous;
  for (size_t begin = 0; begin < bytes; begin += chunk_bytes) {
    LaneChunk chunk;
    chunk.number = begin / chunk_bytes;
    chunk.data = Slice(data, begin, std::min(chunk_bytes, bytes - begin));
    SPARKDL_RETURN_IF_ERROR(ReduceForLanes(chunk, reduction, guard));
    if (worker.has_value()) {
      worker->Submit([this, chunk, &reduction](OperationGuard& lane_guard) {
        return AllReduceOnLane(chunk, reduction, lane_guard);
      });
      SPARKDL_RETURN_IF_ERROR(worker->Await(chunk.number));
    } else if (lane_.has_value()) {
      SPARKDL_RETURN_IF_ERROR(AllReduceOnLane(chunk, reduction, guard));
    }
    if (chunk.number > 0) SPARKDL_RETURN_IF_ERROR(GatherLanes(previous.data, unit, guard));
    previous = std::move(chunk);
  }
  if (worker.has_value()) SPARKDL_RETURN_IF_ERROR(worker->Await(previous.number + 1));
  return GatherLanes(previous.data, unit, guard);
}

// Reduces within the host; each lane's owner gets the accumulators of its part.
Status Collectives::ReduceForLanes(LaneChunk& chunk, const Reduction& reduction,
                                   OperationGuard& guard) {
  const ReduceKernels& kernels = reduction.kernels;
  const size_t bytes = TotalBytes(chunk.data);
  std::vector<ConstPieces> streams(num_lanes());
  ShmGroup::ReduceTarget target{.output = {}, .to_accumulators = true};
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    const Part range = PartOf(bytes, num_lanes(), lane, kUnitElements * kernels.element_bytes);
    const Pieces stream = Slice(chunk.data, range.begin, range.size);
    Append(streams[lane], stream);
    if (owns_lane(lane)) chunk.part = stream;
  }
  if (lane_.has_value()) {
    const size_t accumulator_bytes =
        TotalBytes(chunk.part) / kernels.element_bytes * kernels.accumulator_bytes;
    // Accumulators of the element's size need no memory of their own if the part is contiguous.
    const bool fits = kernels.accumulator_bytes == kernels.element_bytes && chunk.part.size() == 1;
    chunk.accumulators =
        fits ? chunk.part[0].data : Accumulators(accumulator_bytes, chunk.number % 2);
    target.output = {{chunk.accumulators, accumulator_bytes}};
  }
  return inside_.ReduceScatter(streams, target, reduction, guard);
}

Status Collectives::AllReduceOnLane(const LaneChunk& chunk, const Reduction& reduction,
                                    OperationGuard& guard) {
  const Pieces& part = chunk.part;
  std::byte* const accumulators = chunk.accumulators;
  // NOLINTNEXTLINE(bugprone-unchecked-optional-access): only the owner of a lane comes here
  Ring& lane = *lane_;
  const ReduceKernels& kernels = reduction.kernels;
  const size_t count = TotalBytes(part) / kernels.element_bytes;
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
        Slice(part, block.begin * kernels.element_bytes, block.size * kernels.element_bytes));
  }
  SPARKDL_RETURN_IF_ERROR(lane.ReduceScatter(partial, reduction, guard));
  Finalize(reduction, finished[static_cast<size_t>(topology_.host())],
           accumulators + mine.begin * kernels.accumulator_bytes);
  return lane.AllGather(finished, guard, reduction.wire);
}

}  // namespace sparkdl
