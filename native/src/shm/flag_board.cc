#include "sparkdl/flag_board.h"

#include <sched.h>

#include <string>

#include "sparkdl/futex.h"

namespace sparkdl {
namespace {

// About 50 us of spinning: longer than the peers' skew within a tile, and than a futex's round
// trip.
constexpr int kSpins = 4000;
// With more ranks than cores the one waited for may need this very core.
constexpr int kSpinsWhenCrowded = 20;
constexpr int kSpinsBetweenLooks = 64;

int NumUsableCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return CPU_COUNT(&cores);
}

// A peer may be writing its next signature: the sequence is read and written whole.
uint64_t SequenceOf(const Signature& signature) {
  return __atomic_load_n(&signature.sequence, __ATOMIC_RELAXED);
}

}  // namespace

FlagBoard::FlagBoard(std::shared_ptr<Segment> segment, int local_rank, std::vector<int> ranks)
    : segment_(std::move(segment)),
      local_rank_(local_rank),
      ranks_(std::move(ranks)),
      spins_(static_cast<int>(ranks_.size()) <= NumUsableCores() ? kSpins : kSpinsWhenCrowded) {}

void FlagBoard::Begin(const Signature& signature) {
  has_synced_ = false;
  if (segment_ == nullptr) return;
  Signature& mine = segment_->line(local_rank_).signatures[signature.sequence % 2];
  __atomic_store_n(&mine.sequence, signature.sequence, __ATOMIC_RELAXED);
  mine.count = signature.count;
  mine.kind = signature.kind;
  mine.dtype = signature.dtype;
  mine.reduce_op = signature.reduce_op;
  mine.padding = signature.padding;
  mine.root = signature.root;
}

bool FlagBoard::HasReached(int local_rank, uint32_t phase) const {
  const uint32_t theirs = segment_->line(local_rank).phase.load(std::memory_order_acquire);
  return static_cast<int32_t>(theirs - phase) >= 0;
}

Status FlagBoard::Sync(OperationGuard& guard) {
  if (segment_ == nullptr) return {};
  ++phase_;
  FlagLine& mine = segment_->line(local_rank_);
  // Both in the one total order, as are the sleeper's two: either it sees the new phase, or this
  // rank sees the sleeper.
  mine.phase.store(phase_, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) FutexWakeAll(mine.phase);
  for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
    if (other == local_rank_ || HasReached(other, phase_)) continue;
    SPARKDL_RETURN_IF_ERROR(WaitFor(other, guard));
  }
  if (has_synced_) return {};
  has_synced_ = true;
  return CompareSignatures(guard.signature());
}

Status FlagBoard::SyncIfNotYet(OperationGuard& guard) {
  if (has_synced_) return {};
  return Sync(guard);
}

Status FlagBoard::WaitFor(int local_rank, OperationGuard& guard) {
  for (int spin = 0; spin < spins_; ++spin) {
    SpinPause();
    if (HasReached(local_rank, phase_)) return {};
    if (spin % kSpinsBetweenLooks == 0 && guard.has_failure()) break;
  }
  return SleepUntilReached(local_rank, guard);
}

Status FlagBoard::SleepUntilReached(int local_rank, OperationGuard& guard) {
  FlagLine& line = segment_->line(local_rank);
  while (!HasReached(local_rank, phase_)) {
    SPARKDL_RETURN_IF_ERROR(guard.Check());
    const auto slice = guard.Slice();
    if (slice.count() == 0) return Missed(guard);
    line.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = line.phase.load(std::memory_order_seq_cst);
    FutexWake wake = FutexWake::kWokenOrChanged;
    if (static_cast<int32_t>(seen - phase_) < 0) wake = FutexWait(line.phase, seen, slice);
    line.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (wake == FutexWake::kSignal) guard.NoteSignal();
  }
  return {};
}

Status FlagBoard::CompareSignatures(const Signature& mine) const {
  const auto parity = mine.sequence % 2;
  bool agrees = true;
  for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
    agrees = agrees && segment_->line(other).signatures[parity] == mine;
  }
  if (agrees) return {};
  std::string text = "the ranks disagree about operation " + std::to_string(mine.sequence) + ": ";
  for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
    if (other > 0) text += "; ";
    text += "rank " + std::to_string(ranks_[other]) + " said " +
            DescribeFully(segment_->line(other).signatures[parity]);
  }
  return Status(StatusCode::kFailed, text);
}

Status FlagBoard::Missed(OperationGuard& guard) const {
  const uint64_t sequence = guard.signature().sequence;
  std::vector<int> absent;
  std::vector<int> behind;
  for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
    if (HasReached(other, phase_)) continue;
    const bool has_begun =
        SequenceOf(segment_->line(other).signatures[sequence % 2]) == sequence && has_synced_;
    (has_begun ? behind : absent).push_back(ranks_[other]);
  }
  if (!absent.empty()) return guard.TimedOut(NameRanks(absent) + " had not joined");
  // They may be waiting for another host, and then know better who is missing.
  return guard.TimedOutUnlessTold(NameRanks(behind) + " had joined, but did not get further");
}

}  // namespace sparkdl
