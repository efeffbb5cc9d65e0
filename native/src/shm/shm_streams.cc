// Operations of ShmGroup on streams that consist of several pieces.
#include <algorithm>

#include "sparkdl/copy.h"
#include "sparkdl/shm/shm_group.h"

namespace sparkdl {
namespace {

// Copies the next bytes of a stream to contiguous memory (CopyOut), or from there (CopyIn).
void CopyOut(const TileMover& mover, PieceCursor<const std::byte>& stream, std::byte* destination,
             size_t bytes) {
  while (bytes > 0) {
    const ConstPiece piece = stream.Peek(bytes);
    mover.Copy(destination, piece.data, piece.bytes);
    stream.Advance(piece.bytes);
    destination += piece.bytes;
    bytes -= piece.bytes;
  }
}

void CopyIn(const TileMover& mover, PieceCursor<std::byte>& stream, const std::byte* source,
            size_t bytes) {
  while (bytes > 0) {
    const Piece piece = stream.Peek(bytes);
    if (piece.data != nullptr) mover.Copy(piece.data, source, piece.bytes);
    stream.Advance(piece.bytes);
    source += piece.bytes;
    bytes -= piece.bytes;
  }
}

}  // namespace

Status ShmGroup::ReduceScatter(const std::vector<ConstPieces>& streams, const ReduceTarget& target,
                               const Reduction& reduction, OperationGuard& guard) {
  BeginStreams();
  const ReduceKernels& kernels = reduction.kernels;
  const size_t num_owners = streams.size();
  const size_t element_bytes = kernels.element_bytes;
  const size_t out_bytes = target.to_accumulators ? kernels.accumulator_bytes : element_bytes;
  std::vector<PieceCursor<const std::byte>> cursors;
  size_t longest = 0;
  for (const ConstPieces& stream : streams) {
    cursors.emplace_back(stream);
    longest = std::max(longest, cursors.back().remaining());
  }
  PieceCursor<std::byte> output(target.output);
  const bool is_owner = static_cast<size_t>(local_rank_) < num_owners;
  // Each owner's share of a tile, in whole cache lines and whole elements.
  const size_t share = size_ == 1 ? longest : kStreamTileBytes / num_owners / 64 * 64;

  for (size_t done = 0; done < longest; done += share) {
    TileMover mover = BeginTile({.traffic = Traffic::kReduceScatter,
                                 .bytes = std::min(share, longest - done) * num_owners,
                                 .work = reinterpret_cast<uintptr_t>(&kernels),
                                 .is_first = done == 0,
                                 .goes_both_ways = is_owner});
    for (size_t owner = 0; owner < num_owners && size_ > 1; ++owner) {
      if (owner == static_cast<size_t>(local_rank_)) continue;
      const size_t bytes = std::min(share, cursors[owner].remaining());
      CopyOut(mover, cursors[owner], slot(local_rank_) + owner * share, bytes);
    }
    SPARKDL_RETURN_IF_ERROR(SyncTile(mover, guard));
    if (is_owner) {
      PieceCursor<const std::byte>& mine = cursors[local_rank_];
      size_t left = std::min(share, mine.remaining());
      size_t offset = static_cast<size_t>(local_rank_) * share;
      while (left > 0) {
        const ConstPiece from = mine.Peek(left);
        const Piece to = output.Peek(from.bytes / element_bytes * out_bytes);
        const size_t count = to.bytes / out_bytes;
        for (int other = 0; other < size_; ++other) {
          sources_[other] = other == local_rank_ ? static_cast<const void*>(from.data)
                                                 : static_cast<const void*>(slot(other) + offset);
        }
        if (target.to_accumulators) {
          kernels.reduce_to_accumulators(to.data, sources_.data(), sources_.size(), count);
        } else {
          kernels.reduce(to.data, sources_.data(), sources_.size(), count, reduction.finish);
        }
        mine.Advance(count * element_bytes);
        output.Advance(count * out_bytes);
        offset += count * element_bytes;
        left -= count * element_bytes;
      }
    }
    EndTile(mover, kSlotsOfStreamTile);
  }
  return {};
}

Status ShmGroup::Gather(const ConstPieces& mine, const std::vector<Pieces>& destinations,
                        OperationGuard& guard) {
  if (size_ == 1) return {};
  BeginStreams();
  PieceCursor<const std::byte> published(mine);
  std::vector<PieceCursor<std::byte>> cursors;
  size_t longest = published.remaining();
  uint64_t num_sources = 0;
  for (const Pieces& destination : destinations) {
    cursors.emplace_back(destination);
    longest = std::max(longest, cursors.back().remaining());
    if (cursors.back().remaining() > 0) ++num_sources;
  }
  const bool goes_both_ways = published.remaining() > 0 && num_sources > 1;
  for (size_t done = 0; done < longest; done += kStreamTileBytes) {
    TileMover mover = BeginTile({.traffic = Traffic::kGather,
                                 .bytes = std::min(kStreamTileBytes, longest - done),
                                 .work = num_sources,
                                 .is_first = done == 0,
                                 .goes_both_ways = goes_both_ways});
    CopyOut(mover, published, slot(local_rank_), std::min(kStreamTileBytes, published.remaining()));
    SPARKDL_RETURN_IF_ERROR(SyncTile(mover, guard));
    for (int step = 1; step < size_; ++step) {
      const int other = (local_rank_ + step) % size_;
      CopyIn(mover, cursors[other], slot(other),
             std::min(kStreamTileBytes, cursors[other].remaining()));
    }
    EndTile(mover, kSlotsOfStreamTile);
  }
  return {};
}

Status ShmGroup::Exchange(const std::vector<ConstPieces>& outgoing,
                          const std::vector<Pieces>& incoming, size_t longest,
                          OperationGuard& guard) {
  BeginStreams();
  std::vector<PieceCursor<const std::byte>> sent(outgoing.begin(), outgoing.end());
  std::vector<PieceCursor<std::byte>> received(incoming.begin(), incoming.end());
  // Each destination's share of a tile, in whole cache lines.
  const size_t share = kStreamTileBytes / static_cast<size_t>(size_) / 64 * 64;
  for (size_t done = 0; done < longest && size_ > 1; done += share) {
    TileMover mover =
        BeginTile({.traffic = Traffic::kExchange,
                   .bytes = std::min(share, longest - done) * static_cast<size_t>(size_),
                   .is_first = done == 0});
    for (int step = 1; step < size_; ++step) {
      const auto other = static_cast<size_t>((local_rank_ + step) % size_);
      CopyOut(mover, sent[other], slot(local_rank_) + other * share,
              std::min(share, sent[other].remaining()));
    }
    SPARKDL_RETURN_IF_ERROR(SyncTile(mover, guard));
    for (int step = 1; step < size_; ++step) {
      const auto other = static_cast<size_t>((local_rank_ + step) % size_);
      CopyIn(mover, received[other],
             slot(static_cast<int>(other)) + static_cast<size_t>(local_rank_) * share,
             std::min(share, received[other].remaining()));
    }
    EndTile(mover, kSlotsOfStreamTile);
  }
  return {};
}

}  // namespace sparkdl
