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

  // Records the operation that this rank is about to run. The next Sync() shows it to the other
  // ranks.
  void Begin(const Signature& signature);

  // Returns when all ranks of this host have called it as often as this one. This rank can then
  // read what they wrote before. The first Sync() of an operation compares the operations of the
  // ranks: kDisagreement, on all of them, if they differ. distance: if given, notes how long
  // reading local rank 1's flag took, unless this rank had to sleep.
  Status Sync(OperationGuard& guard, PeerDistance* distance = nullptr) {
    return Await(Arrive(), guard, distance);
  }

  // The two halves of a Sync(), for a rank that has work to do in between. Other ranks can read
  // data written before Arrive() once they have awaited the phase that it returns. Between the
  // first Arrive() of an operation and its Await() there must be no second Arrive(), so that ranks
  // that disagree stay in step.
  uint32_t Arrive();
  Status Await(uint32_t phase, OperationGuard& guard, PeerDistance* distance = nullptr);

  // Calls Sync() if the operation has not done so yet: every operation must, to stay in step.
  Status SyncIfNotYet(OperationGuard& guard);

  // Verdict of a lane's owner for the ranks of its host: whether the hosts agree on the operation.
  // A Sync() must lie between SetVerdict() and HostsAgree().
  void SetVerdict(const Signature& signature, bool agrees);
  bool HostsAgree(const Signature& signature) const;

  void Release() { segment_.reset(); }

 private:
  bool HasReached(int local_rank, uint32_t phase, PeerDistance* distance = nullptr);
  Status WaitFor(int local_rank, uint32_t phase, OperationGuard& guard, PeerDistance* distance);
  // Whether that rank, when last seen, ran on the core on which this thread runs now.
  bool SharesCoreWith(int local_rank) const;
  // Makes the scheduler move this thread to a core on which no rank of this host runs, if there is
  // one.
  void LeaveSharedCore();
  Status SleepUntilReached(int local_rank, uint32_t phase, OperationGuard& guard);
  Status CompareDigests(uint64_t sequence) const;

  std::shared_ptr<Segment> segment_;
  const int local_rank_;
  const std::vector<int> ranks_;
  const bool is_crowded_;
  const int spins_;
  std::vector<uint32_t> seen_;  // latest phase seen of each rank
  Clock::time_point next_move_;
  uint32_t phase_ = 0;
  bool has_synced_ = false;
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_FLAG_BOARD_H_
