// AgreedCollectives after a disagreement: a mismatch, or some ranks have joined.
#include <algorithm>
#include <cstring>
#include <string>

#include "sparkdl/collectives/agreed_collectives.h"

namespace sparkdl {

// Description of the operation that a rank has called. The wire format.
struct AgreedCollectives::Claim {
  Signature signature;
  double postscale;
  uint32_t num_arrays;
  uint32_t has_counts;
  char text[464];
};

namespace {

// Kinds of operations that can be carried out without the data of some ranks.
bool WorksWithZeros(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter ||
         kind == OpKind::kAllGather || kind == OpKind::kBarrier;
}

}  // namespace

Status AgreedCollectives::ExchangeClaims(const Operation& operation, std::vector<Claim>& claims,
                                         OperationGuard& guard) {
  static_assert(sizeof(Claim) == 512);
  Claim mine{};
  mine.signature = SignatureOf(operation, guard.signature().sequence);
  mine.postscale = operation.postscale;
  // Only for an allreduce: blocks are streams, which each rank may divide into pieces in its own
  // way.
  const bool is_allreduce = operation.kind == OpKind::kAllReduce;
  mine.num_arrays = is_allreduce ? static_cast<uint32_t>(operation.group.size()) : 0;
  mine.has_counts = operation.counts.empty() ? 0 : 1;
  const std::string text = Describe(operation);
  std::memcpy(mine.text, text.data(), std::min(text.size(), sizeof(mine.text) - 1));
  claims.resize(static_cast<size_t>(topology().world_size()));
  Operation exchange;
  exchange.kind = OpKind::kAllGather;
  exchange.count = sizeof(Claim);
  exchange.input = reinterpret_cast<const std::byte*>(&mine);
  exchange.output = reinterpret_cast<std::byte*>(claims.data());
  SPARKDL_RETURN_IF_ERROR(collectives_.Perform(exchange, guard));
  for (Claim& claim : claims) claim.text[sizeof(claim.text) - 1] = '\0';
  return {};
}

Status AgreedCollectives::Settle(const Operation& operation, OperationGuard& guard) {
  std::vector<Claim> claims;
  SPARKDL_RETURN_IF_ERROR(ExchangeClaims(operation, claims, guard));
  for (size_t rank = 0; rank < claims.size(); ++rank) {
    has_joined_[rank] = claims[rank].signature.kind == OpKind::kJoin;
  }
  const bool has_joined = operation.kind == OpKind::kJoin;
  const int speaker = FindSpeaker(claims);
  if (speaker >= 0 && WorksWithZeros(claims[speaker].signature.kind) &&
      claims[speaker].has_counts == 0) {
    if (has_joined) return Contribute(claims[speaker], speaker, guard);
    if (claims[speaker].num_arrays > 0) {
      Pieces group = operation.group;
      SPARKDL_RETURN_IF_ERROR(ShareGroup(claims[speaker], speaker, group, guard));
    }
    return collectives_.Perform(operation, guard);
  }
  if (has_joined) return {};
  return Status(StatusCode::kMismatch, "the ranks disagree about operation " +
                                           std::to_string(guard.signature().sequence) + ": " +
                                           TellWhoSaidWhat(claims));
}

int AgreedCollectives::FindSpeaker(const std::vector<Claim>& claims) const {
  int speaker = -1;
  for (int rank = 0; rank < topology().world_size(); ++rank) {
    if (has_joined_[static_cast<size_t>(rank)]) continue;
    if (speaker < 0) speaker = rank;
    if (claims[rank].signature != claims[speaker].signature) return -1;
  }
  return speaker;
}

std::string AgreedCollectives::TellWhoSaidWhat(const std::vector<Claim>& claims) {
  std::vector<std::vector<int>> alike;  // ranks with equal claims
  for (size_t rank = 0; rank < claims.size(); ++rank) {
    // The text of a long claim is truncated, so it alone does not distinguish all claims.
    const auto same = std::ranges::find_if(alike, [&](const std::vector<int>& ranks) {
      const Claim& first = claims[static_cast<size_t>(ranks.front())];
      return first.signature == claims[rank].signature &&
             std::strcmp(first.text, claims[rank].text) == 0;
    });
    if (same == alike.end()) {
      alike.push_back({static_cast<int>(rank)});
    } else {
      same->push_back(static_cast<int>(rank));
    }
  }
  std::string text;
  for (const std::vector<int>& ranks : alike) {
    if (!text.empty()) text += "; ";
    text += NameRanks(ranks) + " said " + claims[static_cast<size_t>(ranks.front())].text;
  }
  return text;
}

// Tells the ranks that have joined the sizes of the arrays that the others reduce as a group.
Status AgreedCollectives::ShareGroup(const Claim& claim, int speaker, Pieces& group,
                                     OperationGuard& guard) {
  std::vector<uint64_t> sizes(claim.num_arrays);
  if (topology().rank() == speaker) {
    for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = group[i].bytes;
  }
  Operation share;
  share.kind = OpKind::kBroadcast;
  share.root = speaker;
  share.count = sizes.size() * sizeof(uint64_t);
  share.output = reinterpret_cast<std::byte*>(sizes.data());
  share.input = share.output;
  SPARKDL_RETURN_IF_ERROR(collectives_.Perform(share, guard));
  group.clear();
  for (const uint64_t bytes : sizes) group.push_back({nullptr, bytes});
  return {};
}

// Takes part in the operation of the other ranks with zeros.
Status AgreedCollectives::Contribute(const Claim& claim, int speaker, OperationGuard& guard) {
  Operation operation;
  operation.kind = claim.signature.kind;
  operation.dtype = claim.signature.dtype;
  operation.reduce_op = claim.signature.reduce_op;
  operation.count = claim.signature.count;
  operation.postscale = claim.postscale;
  if (operation.kind == OpKind::kBarrier) return collectives_.Perform(operation, guard);
  const size_t block = operation.bytes();
  const size_t whole = block * static_cast<size_t>(topology().world_size());
  const bool gathers = operation.kind == OpKind::kAllGather;
  const bool scatters = operation.kind == OpKind::kReduceScatter;
  std::vector<std::byte> input(scatters ? whole : block);
  std::vector<std::byte> output(gathers ? whole : scatters ? block : 0);
  operation.input = input.data();
  operation.output = gathers || scatters ? output.data() : input.data();
  if (claim.num_arrays > 0) {
    SPARKDL_RETURN_IF_ERROR(ShareGroup(claim, speaker, operation.group, guard));
    std::byte* next = input.data();
    for (Piece& piece : operation.group) {
      piece.data = next;
      next += piece.bytes;
    }
  }
  return collectives_.Perform(operation, guard);
}

}  // namespace sparkdl
