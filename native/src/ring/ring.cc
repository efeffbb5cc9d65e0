#include "sparkdl/ring.h"

#include <array>
#include <cstring>
#include <utility>

namespace sparkdl {
namespace {

// What leads every operation on a lane.
struct Hello {
  uint32_t magic;
  int32_t rank;
  Signature signature;
};
static_assert(sizeof(Hello) == 32);

constexpr uint32_t kHelloMagic = 0x53504832;  // "SPH2"

void Append(ConstPieces& stream, const Pieces& block) {
  for (const Piece& piece : block) stream.push_back({piece.data, piece.bytes});
}

void Append(Pieces& stream, const Pieces& block) {
  stream.insert(stream.end(), block.begin(), block.end());
}

}  // namespace

Ring::Ring(DuplexStream stream, int rank, int host, int num_hosts)
    : stream_(std::move(stream)), rank_(rank), host_(host), num_hosts_(num_hosts) {}

Status Ring::Begin(OperationGuard& guard) {
  const Hello mine{.magic = kHelloMagic, .rank = rank_, .signature = guard.signature()};
  Hello theirs{};
  DuplexTransfer transfer;
  transfer.outgoing = {{reinterpret_cast<const std::byte*>(&mine), sizeof(mine)}};
  transfer.outgoing_credit = sizeof(mine);
  transfer.incoming = {{reinterpret_cast<std::byte*>(&theirs), sizeof(theirs)}};
  transfer.begins_operation = true;
  SPARKDL_RETURN_IF_ERROR(stream_.Run(transfer, guard));
  if (theirs.magic != kHelloMagic) {
    return Status(StatusCode::kFailed, "rank " + std::to_string(stream_.previous_rank()) +
                                           " sent something that begins no operation");
  }
  if (theirs.signature == guard.signature()) return {};
  return Status(StatusCode::kFailed,
                "the ranks disagree about operation " + std::to_string(guard.signature().sequence) +
                    ": rank " + std::to_string(stream_.previous_rank()) + " said " +
                    DescribeFully(theirs.signature) + "; rank " + std::to_string(rank_) + " said " +
                    DescribeFully(guard.signature()));
}

Status Ring::ReduceScatter(const std::vector<Pieces>& blocks, const ReduceKernels& kernels,
                           OperationGuard& guard) {
  DuplexTransfer transfer;
  for (int step = 1; step < num_hosts_; ++step) {
    Append(transfer.outgoing, blocks[HostBefore(step)]);
    Append(transfer.incoming, blocks[HostBefore(step + 1)]);
  }
  transfer.outgoing_credit = TotalBytes(blocks[HostBefore(1)]);
  transfer.combine_with = &kernels;
  return stream_.Run(transfer, guard);
}

Status Ring::AllGather(const std::vector<Pieces>& blocks, OperationGuard& guard) {
  DuplexTransfer transfer;
  for (int step = 1; step < num_hosts_; ++step) {
    Append(transfer.outgoing, blocks[HostBefore(step - 1)]);
    Append(transfer.incoming, blocks[HostBefore(step)]);
  }
  transfer.outgoing_credit = TotalBytes(blocks[host_]);
  return stream_.Run(transfer, guard);
}

Status Ring::Broadcast(const Piece& data, int root_host, OperationGuard& guard) {
  const int distance = (host_ - root_host + num_hosts_) % num_hosts_;
  DuplexTransfer transfer;
  if (distance < num_hosts_ - 1) transfer.outgoing = {{data.data, data.bytes}};
  if (distance > 0) transfer.incoming = {data};
  if (distance == 0) transfer.outgoing_credit = data.bytes;
  return stream_.Run(transfer, guard);
}

// Once this host has a byte of every other, all have come.
Status Ring::Barrier(OperationGuard& guard) {
  std::vector<std::byte> bytes(static_cast<size_t>(num_hosts_));
  std::vector<Pieces> blocks;
  for (std::byte& byte : bytes) blocks.push_back({{&byte, 1}});
  return AllGather(blocks, guard);
}

}  // namespace sparkdl
