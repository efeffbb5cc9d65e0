#include "sparkdl/shm/flag_board.h"

#include <sched.h>

#include "sparkdl/futex.h"

namespace sparkdl {
namespace {

// About 50 us of spinning: longer than the skew of the peers within a tile, and than the round trip
// of a futex.
constexpr int kSpins = 4000;
// With more ranks than cores, the awaited rank may need this very core.
constexpr int kSpinsWhenCrowded = 20;
constexpr int kSpinsBetweenLooks = 64;
// The scheduler may put two ranks that wake each other on one core and leave them there, because
// they never want to run at the same time: everything then takes four times as long. A rank that
// waits for one that last ran on the same core therefore moves to another core, but not more often
// than the scheduler would.
constexpr std::chrono::milliseconds kBetweenMoves{4};

// Local rank whose distance is noted.
constexpr int kNotedRank = 1;

int NumUsableCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return CPU_COUNT(&cores);
}

}  // namespace

FlagBoard::FlagBoard(std::shared_ptr<Segment> segment, int local_rank, std::vector<int> ranks)
    : segment_(std::move(segment)),
      local_rank_(local_rank),
      ranks_(std::move(ranks)),
      is_crowded_(static_cast<int>(ranks_.size()) > NumUsableCores()),
      spins_(is_crowded_ ? kSpinsWhenCrowded : kSpins),
      seen_(ranks_.size()) {}

void FlagBoard::Begin(const Signature& signature) {
  has_synced_ = false;
  if (segment_ == nullptr) return;
  segment_->line(local_rank_).digests[signature.sequence % 2] = DigestOf(signature);
}

bool FlagBoard::HasReached(int local_rank, uint32_t phase, PeerDistance* distance) {
  uint32_t& seen = seen_[static_cast<size_t>(local_rank)];
  const auto has_reached = [&] { return static_cast<int32_t>(seen - phase) >= 0; };
  if (has_reached()) return true;
  const std::atomic<uint32_t>& theirs = segment_->line(local_rank).phase;
  if (distance == nullptr) {
    seen = theirs.load(std::memory_order_acquire);
    return has_reached();
  }
  const auto begin = Clock::now();
  seen = theirs.load(std::memory_order_acquire);
  const auto took = Clock::now() - begin;
  // Otherwise the line may not have been written since it was last read. (If ranks sleep, it may
  // come from a third rank that went to sleep on it; that is not worth distinguishing.)
  if (has_reached()) distance->Note(took);
  return has_reached();
}

uint32_t FlagBoard::Arrive() {
  ++phase_;
  if (segment_ == nullptr) return phase_;
  FlagLine& mine = segment_->line(local_rank_);
  mine.core.store(::sched_getcpu() + 1, std::memory_order_relaxed);
  // In the one total order, like the two accesses of a sleeping rank: either that rank sees the new
  // phase, or this rank sees the sleeper.
  mine.phase.store(phase_, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) FutexWakeAll(mine.phase);
  return phase_;
}

Status FlagBoard::Await(uint32_t phase, OperationGuard& guard, PeerDistance* distance) {
  if (segment_ == nullptr) return {};
  // Each wait ends when its rank has come, and only ranks that have not come yet are waited for, so
  // the last rank that was waited for came last.
  int last = -1;
  for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
    if (other == local_rank_) continue;
    PeerDistance* const noted = other == kNotedRank ? distance : nullptr;
    if (HasReached(other, phase, noted)) continue;
    SPARKDL_RETURN_IF_ERROR(WaitFor(other, phase, guard, noted));
    last = ranks_[other];
  }
  if (has_synced_) return {};
  has_synced_ = true;
  guard.NoteAllHere(last);
  return CompareDigests(guard.signature().sequence);
}

Status FlagBoard::SyncIfNotYet(OperationGuard& guard) {
  if (has_synced_) return {};
  return Sync(guard);
}

Status FlagBoard::WaitFor(int local_rank, uint32_t phase, OperationGuard& guard,
                          PeerDistance* distance) {
  for (int spin = 0; spin < spins_; ++spin) {
    SpinPause();
    if (HasReached(local_rank, phase, distance)) return {};
    if (spin % kSpinsBetweenLooks != 0) continue;
    if (!has_synced_) guard.NoteWaiting();
    if (guard.has_failure()) break;
    if (spin > 0 && SharesCoreWith(local_rank)) LeaveSharedCore();
  }
  return SleepUntilReached(local_rank, phase, guard);
}

bool FlagBoard::SharesCoreWith(int local_rank) const {
  return !is_crowded_ &&
         segment_->line(local_rank).core.load(std::memory_order_relaxed) == ::sched_getcpu() + 1;
}

void FlagBoard::LeaveSharedCore() {
  const auto now = Clock::now();
  if (now < next_move_) return;
  next_move_ = now + kBetweenMoves;
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (::sched_getaffinity(0, sizeof(usable), &usable) != 0) return;
  cpu_set_t free = usable;
  for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
    const int core = segment_->line(other).core.load(std::memory_order_relaxed) - 1;
    if (core >= 0 && core < CPU_SETSIZE) CPU_CLR(core, &free);
  }
  if (CPU_COUNT(&free) == 0 || ::sched_setaffinity(0, sizeof(free), &free) != 0) return;
  // The thread has moved; from here on the scheduler may place it as usual.
  static_cast<void>(::sched_setaffinity(0, sizeof(usable), &usable));
  segment_->line(local_rank_).core.store(::sched_getcpu() + 1, std::memory_order_relaxed);
}

Status FlagBoard::SleepUntilReached(int local_rank, uint32_t phase, OperationGuard& guard) {
  FlagLine& line = segment_->line(local_rank);
  if (has_synced_) {
    guard.NoteProgress();
  } else {
    guard.NoteWaiting();
  }
  while (!HasReached(local_rank, phase)) {
    SPARKDL_RETURN_IF_ERROR(guard.Check());
    SPARKDL_RETURN_IF_ERROR(guard.HeedStall());
    const auto slice = guard.Slice();
    if (slice.count() == 0) return guard.TimedOut();
    line.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = line.phase.load(std::memory_order_seq_cst);
    FutexWake wake = FutexWake::kWokenOrChanged;
    if (static_cast<int32_t>(seen - phase) < 0) wake = FutexWait(line.phase, seen, slice);
    line.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (wake == FutexWake::kSignal) guard.NoteSignal();
  }
  // A woken thread is often put on the core of the thread that woke it.
  if (SharesCoreWith(local_rank)) LeaveSharedCore();
  return {};
}

Status FlagBoard::CompareDigests(uint64_t sequence) const {
  const auto parity = sequence % 2;
  const uint64_t mine = segment_->line(local_rank_).digests[parity];
  bool agrees = true;
  for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
    agrees = agrees && segment_->line(other).digests[parity] == mine;
  }
  if (agrees) return {};
  return Status(StatusCode::kDisagreement, "the ranks of this host disagree");
}

void FlagBoard::SetVerdict(const Signature& signature, bool agrees) {
  if (segment_ != nullptr) {
    segment_->line(local_rank_).verdicts[signature.sequence % 2] = agrees ? 1 : 0;
  }
}

bool FlagBoard::HostsAgree(const Signature& signature) const {
  return segment_ == nullptr || segment_->line(0).verdicts[signature.sequence % 2] == 1;
}

}  // namespace sparkdl
