// Synchronisation of the ranks of one host through their flag lines.
#ifndef SPARKDL_SHM_FLAG_BOARD_H_
#define SPARKDL_SHM_FLAG_BOARD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "sparkdl/deadline.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/shm/peer_distance.h"
#include "sparkdl/shm/segment.h"
#include "sparkdl/status.h"

namespace sparkdl {

class FlagBoard {
 public:
  // ranks: the ranks of this host, ascending. segment may be null if there is only one.
  FlagBoard(std::shared_ptr<Segment> segment, int local_rank, std::vector<int> ranks);

  // Writes down what this rank is about to do. The first Sync() afterwards tells the others.
  void Begin(const Signature& signature);

  // Returns when all ranks of this host have called it as often as this one. What they wrote
  // before, this rank can read afterwards. The first time in an operation it compares what they are
  // about to do: kDisagreement, on all of them, if that differs.
  // distance: if given, is told how long local rank 1's flag took, unless this rank had to sleep.
  Status Sync(OperationGuard& guard, PeerDistance* distance = nullptr) {
    return Await(Arrive(), guard, distance);
  }

  // The two halves of a Sync(), for a rank that has something to do in between: what it wrote so
  // far, others can read once they have awaited the phase that is returned. Between the first of an
  // operation and its wait there must be no second: ranks that disagree have to stay in step.
  uint32_t Arrive();
  Status Await(uint32_t phase, OperationGuard& guard, PeerDistance* distance = nullptr);

  // Syncs if the operation has not done so yet: every operation must, to keep step.
  Status SyncIfNotYet(OperationGuard& guard);

  // What the owner of a lane tells the ranks of its host, after a Sync() in between: whether the
  // hosts agree about the operation.
  void SetVerdict(const Signature& signature, bool agrees);
  bool HostsAgree(const Signature& signature) const;

  void Release() { segment_.reset(); }

 private:
  bool HasReached(int local_rank, uint32_t phase, PeerDistance* distance = nullptr);
  Status WaitFor(int local_rank, uint32_t phase, OperationGuard& guard, PeerDistance* distance);
  // Whether that rank, when last heard of, ran on the core that this one runs on now.
  bool SharesCoreWith(int local_rank) const;
  // Has the scheduler move this thread to a core that no rank of this host has, if there is one.
  void LeaveSharedCore();
  Status SleepUntilReached(int local_rank, uint32_t phase, OperationGuard& guard);
  Status CompareDigests(uint64_t sequence) const;

  std::shared_ptr<Segment> segment_;
  const int local_rank_;
  const std::vector<int> ranks_;
  const bool is_crowded_;
  const int spins_;
  std::vector<uint32_t> seen_;  // of everybody's phases
  Clock::time_point next_move_;
  uint32_t phase_ = 0;
  bool has_synced_ = false;
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_FLAG_BOARD_H_
