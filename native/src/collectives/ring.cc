#include "sparkdl/collectives/ring.h"

#include <utility>

namespace sparkdl {
namespace {

// What each host sends about an operation before data moves.
struct Hello {
  uint64_t digest;
  uint32_t magic;
  uint32_t agrees;
};
static_assert(sizeof(Hello) == 16);

constexpr uint32_t kHelloMagic = 0x53504833;  // "SPH3"

}  // namespace

Ring::Ring(DuplexStream stream, int host, std::vector<int> ranks)
    : stream_(std::move(stream)),
      host_(host),
      ranks_(std::move(ranks)),
      num_hosts_(static_cast<int>(ranks_.size())) {}

Result<bool> Ring::Agree(bool agrees, OperationGuard& guard) {
  std::vector<Hello> hellos(static_cast<size_t>(num_hosts_));
  hellos[static_cast<size_t>(host_)] = {
      .digest = DigestOf(guard.signature()), .magic = kHelloMagic, .agrees = agrees ? 1U : 0U};
  std::vector<Pieces> blocks;
  for (Hello& hello : hellos)
    blocks.push_back({{reinterpret_cast<std::byte*>(&hello), sizeof(hello)}});
  SPARKDL_RETURN_IF_ERROR(stream_.Run(AllGatherOf(blocks), guard));
  const Hello& mine = hellos[static_cast<size_t>(host_)];
  // Starting with the nearest host, because everything comes through it.
  for (int step = 1; step < num_hosts_; ++step) {
    const auto other = static_cast<size_t>(HostBefore(step));
    const Hello& hello = hellos[other];
    if (hello.magic != kHelloMagic) {
      return Status(StatusCode::kFailed, "rank " + std::to_string(ranks_[other]) +
                                             " sent something that begins no operation");
    }
    agrees = agrees && hello.agrees == 1 && hello.digest == mine.digest;
  }
  return agrees;
}

Status Ring::ReduceScatter(const std::vector<Pieces>& blocks, const Reduction& reduction,
                           OperationGuard& guard) {
  DuplexTransfer transfer;
  for (int step = 1; step < num_hosts_; ++step) {
    Append(transfer.outgoing, blocks[HostBefore(step)]);
    Append(transfer.incoming, blocks[HostBefore(step + 1)]);
  }
  transfer.outgoing_credit = TotalBytes(blocks[HostBefore(1)]);
  transfer.combine_with = &reduction.kernels;
  transfer.wire = reduction.wire;
  return stream_.Run(transfer, guard);
}

DuplexTransfer Ring::AllGatherOf(const std::vector<Pieces>& blocks) const {
  DuplexTransfer transfer;
  for (int step = 1; step < num_hosts_; ++step) {
    Append(transfer.outgoing, blocks[HostBefore(step - 1)]);
    Append(transfer.incoming, blocks[HostBefore(step)]);
  }
  transfer.outgoing_credit = TotalBytes(blocks[host_]);
  return transfer;
}

Status Ring::AllGather(const std::vector<Pieces>& blocks, OperationGuard& guard,
                       const WireFormat* wire) {
  DuplexTransfer transfer = AllGatherOf(blocks);
  transfer.wire = wire;
  // All hosts must have the same bits, including this one.
  if (wire != nullptr) wire->Round(blocks[static_cast<size_t>(host_)]);
  return stream_.Run(transfer, guard);
}

// A chain that begins at the host after the root's and ends at the root's.
Status Ring::Reduce(const Pieces& data, int root_host, const Reduction& reduction,
                    OperationGuard& guard) {
  const int distance = DistanceFrom(root_host);
  DuplexTransfer transfer;
  if (distance != 0) Append(transfer.outgoing, data);
  if (distance != 1) transfer.incoming = data;
  if (distance == 1) transfer.outgoing_credit = TotalBytes(data);
  transfer.combine_with = &reduction.kernels;
  transfer.wire = reduction.wire;
  return stream_.Run(transfer, guard);
}

// The same chain: each host sends its own block, then the blocks that come from the hosts before
// it.
Status Ring::Gather(const std::vector<Pieces>& blocks, int root_host, OperationGuard& guard) {
  const int distance = DistanceFrom(root_host);
  const int num_before = (distance == 0 ? num_hosts_ : distance) - 1;
  DuplexTransfer transfer;
  std::vector<std::byte> passing;
  for (int step = 1; step <= num_before; ++step) {
    Append(transfer.incoming, blocks[HostBefore(step)]);
  }
  if (distance != 0) {
    passing.resize(TotalBytes(transfer.incoming));
    transfer.incoming = {{passing.data(), passing.size()}};
    Append(transfer.outgoing, blocks[host_]);
    transfer.outgoing_credit = TotalBytes(transfer.outgoing);
    Append(transfer.outgoing, transfer.incoming);
  }
  return stream_.Run(transfer, guard);
}

// A chain that begins at the root's host, with the block of the farthest host first.
Status Ring::Scatter(const std::vector<Pieces>& blocks, int root_host, OperationGuard& guard) {
  const int distance = DistanceFrom(root_host);
  DuplexTransfer transfer;
  Pieces farther;
  for (int other = num_hosts_ - 1; other > distance; --other) {
    Append(farther, blocks[(root_host + other) % num_hosts_]);
  }
  std::vector<std::byte> passing;
  if (distance == 0) {
    transfer.outgoing_credit = TotalBytes(farther);
  } else {
    passing.resize(TotalBytes(farther));
    farther = {{passing.data(), passing.size()}};
    transfer.incoming = farther;
    Append(transfer.incoming, blocks[host_]);
  }
  Append(transfer.outgoing, farther);
  return stream_.Run(transfer, guard);
}

// In step s every host passes on the data that has to travel s hops or more from its origin.
Status Ring::AllToAll(const std::vector<ConstPieces>& outgoing, const std::vector<Pieces>& incoming,
                      const std::function<size_t(int, int)>& bytes, OperationGuard& guard) {
  std::vector<std::byte> passing;
  ConstPieces sent;
  for (int hops = num_hosts_ - 1; hops >= 1; --hops) {
    const ConstPieces& block = outgoing[(host_ + hops) % num_hosts_];
    sent.insert(sent.end(), block.begin(), block.end());
  }
  for (int step = 1; step < num_hosts_; ++step) {
    const int origin = HostBefore(step);
    size_t passing_bytes = 0;
    for (int hops = num_hosts_ - 1; hops > step; --hops) {
      passing_bytes += bytes(origin, (origin + hops) % num_hosts_);
    }
    std::vector<std::byte> next(passing_bytes);
    DuplexTransfer transfer;
    transfer.outgoing = sent;
    transfer.outgoing_credit = TotalBytes(sent);
    transfer.incoming = {{next.data(), next.size()}};
    Append(transfer.incoming, incoming[origin]);
    SPARKDL_RETURN_IF_ERROR(stream_.Run(transfer, guard));
    passing = std::move(next);
    sent = {{passing.data(), passing.size()}};
  }
  return {};
}

Status Ring::Broadcast(const Piece& data, int root_host, OperationGuard& guard) {
  const int distance = DistanceFrom(root_host);
  DuplexTransfer transfer;
  if (distance < num_hosts_ - 1) transfer.outgoing = {{data.data, data.bytes}};
  if (distance > 0) transfer.incoming = {data};
  if (distance == 0) transfer.outgoing_credit = data.bytes;
  return stream_.Run(transfer, guard);
}

}  // namespace sparkdl
