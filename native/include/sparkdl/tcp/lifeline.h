// Messages about failures, departures and stalls, on a ring of sockets over all ranks that carries
// nothing else.
#ifndef SPARKDL_TCP_LIFELINE_H_
#define SPARKDL_TCP_LIFELINE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "sparkdl/deadline.h"
#include "sparkdl/failure_latch.h"
#include "sparkdl/status.h"
#include "sparkdl/tcp/fork_guard.h"
#include "sparkdl/tcp/roll_book.h"

namespace sparkdl {

// A connection that ends without a goodbye means that the neighbour died. The first rank that
// learns of a failure tells both neighbours, and every rank passes the message on, so that it
// reaches all ranks in at most half the ring.
//
// A rank that waits too long for others calls the roll: every rank passes the call on and answers
// with the number of operations that it has begun. A rank whose answer is missing is frozen or
// cannot be reached. Threads that compute or wait do not keep a rank from answering.
//
// Only the progress thread may call Service(); the other methods may be called from any thread.
class Lifeline {
 public:
  // The rank that closed the communicator first, and the first operation in which it does not take
  // part.
  struct Leaver {
    int rank;
    uint64_t next_sequence;
  };

  // Takes ownership of the sockets. In a world of one both are invalid.
  Lifeline(int rank, int world_size, GuardedSocket to_next, GuardedSocket from_previous,
           FailureLatch& failure);

  // Reads the messages that have arrived, without blocking; sets the failure latch and passes
  // messages on.
  void Service();

  // Sockets to poll for input; -1 where the neighbour has left.
  std::array<int, 2> PollFds();

  // Tells all ranks of a failure that began on this rank.
  void Spread(const Status& status);

  // Tells all ranks that this one leaves in an orderly way, then closes both connections.
  void Goodbye(uint64_t next_sequence);

  // Notes that this rank begins the operation.
  void NoteBegun(uint64_t sequence) { num_begun_.store(sequence + 1, std::memory_order_relaxed); }

  // Asks all ranks how many operations they have begun; returns the number of the call. Uses a call
  // that any rank made a moment ago, if there is one.
  uint32_t CallRoll();

  // State of an operation according to the answers to a call.
  Attendance AttendanceOf(uint64_t sequence, uint32_t call);

  std::optional<Leaver> leaver() const;
  bool has_leaver() const { return leaver_rank_.load(std::memory_order_acquire) >= 0; }

 private:
  static constexpr size_t kMaxReasonBytes = 1024;
  static constexpr uint32_t kMagic = 0x53504c31;  // "SPL1"

  enum class MessageType : uint8_t { kGoodbye = 0, kFailure = 1, kRollCall = 2, kAnswer = 3 };

  // Wire format; text_bytes of text follow. next_sequence: first operation in which `rank` no
  // longer takes part (kGoodbye), or that it has not begun (kAnswer).
  struct Header {
    uint32_t magic;
    MessageType type;
    StatusCode code;
    uint16_t text_bytes;
    int32_t rank;
    uint32_t call;
    uint64_t next_sequence;
  };
  static_assert(sizeof(Header) == 24);

  struct Link {
    GuardedSocket fd;
    int peer = -1;
    bool said_goodbye = false;
    bool is_clogged = false;
    size_t filled = 0;
    std::array<std::byte, sizeof(Header) + kMaxReasonBytes> buffer{};
  };

  void Drain(Link& link);
  bool Parse(Link& link);
  void Act(Link& link, const Header& header, const char* text);
  void Lost(Link& link, const std::string& how);
  void NoteLeaver(int rank, uint64_t next_sequence);
  void PassOnCall(uint32_t call);
  void PassOnAnswer(int rank, uint32_t call, uint64_t num_begun);
  void Send(const Header& header, const std::string& text);
  void SendFailure(StatusCode code, int origin, const std::string& text);

  const int rank_;
  FailureLatch& failure_;
  std::mutex mutex_;  // guards the members up to spread_
  std::array<Link, 2> links_;
  RollBook roll_book_;
  Clock::time_point last_call_time_;
  bool spread_ = false;
  std::atomic<uint64_t> num_begun_{0};
  std::atomic<int> leaver_rank_{-1};
  std::atomic<uint64_t> leaver_next_sequence_{0};
};

}  // namespace sparkdl

#endif  // SPARKDL_TCP_LIFELINE_H_
