// Collectives that are carried out only if all ranks are about to do the same.
#ifndef SPARKDL_RING_AGREED_COLLECTIVES_H_
#define SPARKDL_RING_AGREED_COLLECTIVES_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sparkdl/operation.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/ring/collectives.h"
#include "sparkdl/ring/ring.h"
#include "sparkdl/shm/segment.h"
#include "sparkdl/status.h"
#include "sparkdl/topology.h"

namespace sparkdl {

// Not thread-safe: one operation at a time.
class AgreedCollectives {
 public:
  // As Collectives.
  AgreedCollectives(const Topology& topology, std::shared_ptr<Segment> segment,
                    std::optional<Ring> ring, Dtype wire);

  // Runs the operation of guard.signature(). The operation was validated. kMismatch, on all ranks
  // and with nothing written, if the ranks do not agree about it. A join that some ranks have not
  // called yet takes part in what they do, and leaves its output as it is.
  Status Run(const Operation& operation, OperationGuard& guard);

  // Closes the lane and lets go of the segment; nothing may run any more.
  void Release() { collectives_.Release(); }

 private:
  struct Claim;

  // Finds out whether all ranks are about to do the same; kDisagreement if not. On one host this is
  // left to the operation's first synchronisation.
  Status Agree(OperationGuard& guard);
  Status Perform(const Operation& operation, OperationGuard& guard);
  Status FinishJoin(const Operation& operation, OperationGuard& guard);

  // What follows a disagreement: the ranks tell each other what they are about to do. Those that
  // have joined take part in what the others agree on.
  Status Settle(const Operation& operation, OperationGuard& guard);
  Status ExchangeClaims(const Operation& operation, std::vector<Claim>& claims,
                        OperationGuard& guard);
  // The rank whose claim all ranks that have not joined share; -1 if they do not.
  int FindSpeaker(const std::vector<Claim>& claims) const;
  Status Contribute(const Claim& claim, int speaker, OperationGuard& guard);
  Status ShareGroup(const Claim& claim, int speaker, Pieces& group, OperationGuard& guard);
  static std::string TellWhoSaidWhat(const std::vector<Claim>& claims);

  FlagBoard& board() { return collectives_.inside().board(); }
  const Topology& topology() const { return collectives_.topology(); }

  Collectives collectives_;
  std::vector<bool> has_joined_;  // by rank
};

}  // namespace sparkdl

#endif  // SPARKDL_RING_AGREED_COLLECTIVES_H_
