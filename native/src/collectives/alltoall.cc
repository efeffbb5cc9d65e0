// Collectives' alltoall.
#include <algorithm>
#include <string>
#include <utility>

#include "sparkdl/collectives/collectives.h"
#include "sparkdl/copy.h"

namespace sparkdl {

// Number of bytes that every rank sends to every other, and where they lie in this rank's buffers.
class Collectives::Exchanges {
 public:
  Exchanges(const Operation& operation, int world_size)
      : world_size_(static_cast<size_t>(world_size)),
        element_bytes_(BytesOf(operation.dtype)),
        outgoing_(operation.counts, operation.count, element_bytes_, world_size),
        incoming_(operation.receive_counts, operation.count, element_bytes_, world_size),
        block_(operation.bytes()) {}

  // counts: for every rank, the elements that it sends to each rank, then those that it expects
  // from each.
  Status Learn(std::vector<uint64_t> counts) {
    counts_ = std::move(counts);
    for (size_t from = 0; from < world_size_; ++from) {
      for (size_t to = 0; to < world_size_; ++to) {
        const uint64_t sent = counts_[2 * from * world_size_ + to];
        const uint64_t expected = counts_[(2 * to + 1) * world_size_ + from];
        if (sent == expected) continue;
        return Status(StatusCode::kMismatch,
                      "the ranks disagree about alltoall: rank " + std::to_string(from) +
                          " sends " + std::to_string(sent) + " elements to rank " +
                          std::to_string(to) + ", which expects " + std::to_string(expected));
      }
    }
    return {};
  }

  size_t bytes(int from, int to) const {
    if (counts_.empty()) return block_;
    return counts_[2 * static_cast<size_t>(from) * world_size_ + static_cast<size_t>(to)] *
           element_bytes_;
  }
  const Blocks& outgoing() const { return outgoing_; }
  const Blocks& incoming() const { return incoming_; }

 private:
  const size_t world_size_;
  const size_t element_bytes_;
  const Blocks outgoing_;
  const Blocks incoming_;
  const size_t block_;
  std::vector<uint64_t> counts_;  // empty if all blocks have block_ bytes
};

Status Collectives::AllToAll(const Operation& operation, OperationGuard& guard) {
  Exchanges exchanges(operation, topology_.world_size());
  if (!operation.counts.empty()) {
    SPARKDL_RETURN_IF_ERROR(ExchangeCounts(operation, exchanges, guard));
  }
  SPARKDL_RETURN_IF_ERROR(AllToAllInside(operation, exchanges, guard));
  SPARKDL_RETURN_IF_ERROR(inside_.board().SyncIfNotYet(guard));
  CopyBytes(operation.output + exchanges.incoming().begin(topology_.rank()),
            operation.input + exchanges.outgoing().begin(topology_.rank()),
            exchanges.outgoing().bytes(topology_.rank()));
  if (!spans_hosts()) return {};
  return AllToAllAcross(operation, exchanges, guard);
}

Status Collectives::ExchangeCounts(const Operation& operation, Exchanges& exchanges,
                                   OperationGuard& guard) {
  const auto world_size = static_cast<size_t>(topology_.world_size());
  std::vector<uint64_t> mine = operation.counts;
  mine.insert(mine.end(), operation.receive_counts.begin(), operation.receive_counts.end());
  std::vector<uint64_t> all(2 * world_size * world_size);
  Operation exchange;
  exchange.kind = OpKind::kAllGather;
  exchange.count = mine.size() * sizeof(uint64_t);
  exchange.input = reinterpret_cast<const std::byte*>(mine.data());
  exchange.output = reinterpret_cast<std::byte*>(all.data());
  SPARKDL_RETURN_IF_ERROR(AllGather(exchange, guard));
  return exchanges.Learn(std::move(all));
}

Status Collectives::AllToAllInside(const Operation& operation, const Exchanges& exchanges,
                                   OperationGuard& guard) {
  std::vector<ConstPieces> outgoing;
  std::vector<Pieces> incoming;
  size_t longest = 0;
  for (const int rank : topology_.local_ranks()) {
    outgoing.push_back(
        {{operation.input + exchanges.outgoing().begin(rank), exchanges.outgoing().bytes(rank)}});
    incoming.push_back(
        {{operation.output + exchanges.incoming().begin(rank), exchanges.incoming().bytes(rank)}});
    for (const int other : topology_.local_ranks()) {
      if (other != rank) longest = std::max(longest, exchanges.bytes(rank, other));
    }
  }
  return inside_.Exchange(outgoing, incoming, longest, guard);
}

// Lane i carries part i of every block. Its owner collects the parts of its host's ranks, exchanges
// them with the owners on the other hosts, and publishes the parts that it received.
Status Collectives::AllToAllAcross(const Operation& operation, const Exchanges& exchanges,
                                   OperationGuard& guard) {
  const int me = topology_.rank();
  const auto num_hosts = static_cast<size_t>(topology_.num_hosts());
  const auto my_lane = static_cast<size_t>(topology_.local_rank());
  const auto part_of = [&](size_t lane, int from, int to) {
    return PartOf(exchanges.bytes(from, to), num_lanes(), lane);
  };
  const auto lane_bytes = [&](int from_host, int to_host) {
    size_t bytes = 0;
    for (const int to : topology_.ranks_on(to_host)) {
      for (const int from : topology_.ranks_on(from_host)) {
        bytes += part_of(my_lane, from, to).size;
      }
    }
    return bytes;
  };
  size_t staged_bytes = 0;
  for (int host = 0; lane_.has_value() && host < topology_.num_hosts(); ++host) {
    if (host == topology_.host()) continue;
    staged_bytes += lane_bytes(topology_.host(), host) + lane_bytes(host, topology_.host());
  }
  std::vector<std::byte> staged(staged_bytes);
  std::byte* next = staged.data();
  const auto stage = [&](size_t bytes) {
    next += bytes;
    return Piece{next - bytes, bytes};
  };

  // By host: the parts of this rank's lane, ordered by destination, then by source.
  std::vector<ConstPieces> outgoing(num_hosts);
  std::vector<Pieces> incoming(num_hosts);
  // By rank of this host: all its blocks for other hosts. This rank keeps the parts of its
  // lane.
  std::vector<Pieces> collected(static_cast<size_t>(inside_.size()));
  ConstPieces published;
  for (int host = 0; host < topology_.num_hosts(); ++host) {
    if (host == topology_.host()) continue;
    for (const int to : topology_.ranks_on(host)) {
      for (const int from : topology_.local_ranks()) {
        const std::byte* const own = operation.input + exchanges.outgoing().begin(to);
        if (from == me) published.push_back({own, exchanges.bytes(from, to)});
        const Part part = lane_.has_value() ? part_of(my_lane, from, to) : Part{};
        Piece place{nullptr, part.size};
        if (lane_.has_value()) {
          if (from != me) place = stage(part.size);
          outgoing[host].push_back({from == me ? own + part.begin : place.data, part.size});
        }
        Pieces& stream = collected[topology_.local_rank_of(from)];
        stream.push_back({nullptr, part.begin});
        stream.push_back(place);
        stream.push_back({nullptr, exchanges.bytes(from, to) - part.begin - part.size});
      }
    }
  }
  SPARKDL_RETURN_IF_ERROR(inside_.Gather(published, collected, guard));

  std::vector<Pieces> arrived(static_cast<size_t>(inside_.size()));
  ConstPieces brought;
  for (int host = 0; host < topology_.num_hosts(); ++host) {
    if (host == topology_.host()) continue;
    for (const int to : topology_.local_ranks()) {
      for (const int from : topology_.ranks_on(host)) {
        std::byte* const own = operation.output + exchanges.incoming().begin(from);
        for (size_t lane = 0; lane < num_lanes(); ++lane) {
          const Part part = part_of(lane, from, to);
          Piece place{to == me ? own + part.begin : nullptr, part.size};
          if (owns_lane(lane)) {
            incoming[host].push_back(to == me ? place : stage(part.size));
          }
          // The lane's owner does not publish the parts that it keeps itself.
          if (topology_.local_rank_of(to) == static_cast<int>(lane)) continue;
          if (owns_lane(lane)) {
            const Piece& mine = incoming[host].back();
            brought.push_back({mine.data, mine.bytes});
          }
          arrived[lane].push_back(place);
        }
      }
    }
  }
  if (lane_.has_value()) {
    SPARKDL_RETURN_IF_ERROR(lane_->AllToAll(outgoing, incoming, lane_bytes, guard));
  }
  return inside_.Gather(brought, arrived, guard);
}

}  // namespace sparkdl
