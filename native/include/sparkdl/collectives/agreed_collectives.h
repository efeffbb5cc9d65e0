// Collectives that are carried out only if all ranks agree on the operation.
#ifndef SPARKDL_RING_AGREED_COLLECTIVES_H_
#define SPARKDL_RING_AGREED_COLLECTIVES_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sparkdl/collectives/collectives.h"
#include "sparkdl/collectives/ring.h"
#include "sparkdl/operation.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/shm/segment.h"
#include "sparkdl/status.h"
#include "sparkdl/topology.h"

namespace sparkdl {

// Not thread-safe: one operation at a time.
class AgreedCollectives {
 public:
  // See Collectives.
  AgreedCollectives(const Topology& topology, std::shared_ptr<Segment> segment,
                    std::optional<Ring> ring, Dtype wire);

  // Runs the validated operation of guard.signature(). kMismatch, on all ranks and with nothing
  // written, if the ranks do not agree on it. A join that some ranks have not called yet takes part
  // in their operation, and leaves its output unchanged.
  Status Run(const Operation& operation, OperationGuard& guard);

  // Closes the lane and releases the segment. No operation may run afterwards.
  void Release() { collectives_.Release(); }

 private:
  struct Claim;

  // Finds out whether all ranks agree on the operation; kDisagreement if not. On one host, the
  // operation's first synchronisation finds this out instead.
  Status Agree(OperationGuard& guard);
  Status Perform(const Operation& operation, OperationGuard& guard);
  Status FinishJoin(const Operation& operation, OperationGuard& guard);

  // Handles a disagreement: the ranks exchange claims, that is, descriptions of the operations that
  // they called. Ranks that have joined take part in the operation on which the others agree.
  Status Settle(const Operation& operation, OperationGuard& guard);
  Status ExchangeClaims(const Operation& operation, std::vector<Claim>& claims,
                        OperationGuard& guard);
  // A rank whose claim is that of all ranks that have not joined; -1 if they differ.
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
