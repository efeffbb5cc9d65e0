#include "sparkdl/collectives/agreed_collectives.h"

#include <utility>

#include "sparkdl/copy.h"

namespace sparkdl {

AgreedCollectives::AgreedCollectives(const Topology& topology, std::shared_ptr<Segment> segment,
                                     std::optional<Ring> ring, Dtype wire)
    : collectives_(topology, std::move(segment), std::move(ring), wire),
      has_joined_(static_cast<size_t>(topology.world_size())) {}

Status AgreedCollectives::Run(const Operation& operation, OperationGuard& guard) {
  board().Begin(guard.signature());
  collectives_.inside().BeginOperation();
  Status status = Agree(guard);
  if (status.ok()) status = Perform(operation, guard);
  if (status.ok()) status = board().SyncIfNotYet(guard);
  if (status.code() != StatusCode::kDisagreement) return status;
  collectives_.inside().GiveUpOperation();
  // Arrays need not lie at the same offset of an arena on all ranks, and a rank that has joined has
  // none there: they are then reduced like any others.
  Operation anywhere = operation;
  anywhere.arena = nullptr;
  return Settle(anywhere, guard);
}

Status AgreedCollectives::Agree(OperationGuard& guard) {
  if (!collectives_.spans_hosts()) return {};
  Status inside = board().SyncIfNotYet(guard);
  if (!inside.ok() && inside.code() != StatusCode::kDisagreement) return inside;
  bool agrees = inside.ok();
  guard.NoteWaiting();
  if (auto& lane = collectives_.lane(); lane.has_value()) {
    auto hosts = lane->Agree(agrees, guard);
    if (!hosts.ok()) return hosts.status();
    agrees = hosts.value();
  }
  // Ranks without a lane only know the result of their own host.
  if (topology().local_size() > topology().num_lanes()) {
    if (topology().local_rank() == 0) board().SetVerdict(guard.signature(), agrees);
    SPARKDL_RETURN_IF_ERROR(board().Sync(guard));
    agrees = board().HostsAgree(guard.signature());
  }
  guard.NoteAllHere(-1);
  if (agrees) return {};
  return Status(StatusCode::kDisagreement, "the hosts disagree");
}

Status AgreedCollectives::Perform(const Operation& operation, OperationGuard& guard) {
  if (operation.kind == OpKind::kJoin) return FinishJoin(operation, guard);
  return collectives_.Perform(operation, guard);
}

// Completes a join that all ranks have called: outputs the rank that joined last and resets
// has_joined_. kDisagreement if some ranks have not joined.
Status AgreedCollectives::FinishJoin(const Operation& operation, OperationGuard& guard) {
  SPARKDL_RETURN_IF_ERROR(board().SyncIfNotYet(guard));
  int64_t last = topology().world_size() - 1;
  while (last > 0 && has_joined_[static_cast<size_t>(last)]) --last;
  has_joined_.assign(has_joined_.size(), false);
  CopyBytes(operation.output, &last, sizeof(last));
  return {};
}

}  // namespace sparkdl
