// News of life and death, on a ring of sockets over all ranks that carries nothing else.
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

// A connection that ends without a goodbye means that the neighbour died. Whoever learns of a
// failure first tells both neighbours, who pass it on, so it reaches everyone in at most half the
// ring.
//
// A rank that waits too long for others calls the roll: everybody passes the call on and answers
// how far it has come, and whose answer is missing is frozen or cannot be reached. Threads that
// compute or wait do not keep a rank from answering.
//
// Service() belongs to the progress thread; the other methods may be called by any thread.
class Lifeline {
 public:
  // Which rank closed the communicator first, and the first operation in which it takes no part.
  struct Leaver {
    int rank;
    uint64_t next_sequence;
  };

  // Takes the sockets over. For a world of one both are invalid.
  Lifeline(int rank, int world_size, GuardedSocket to_next, GuardedSocket from_previous,
           FailureLatch& failure);

  // Reads what has come, without blocking; sets the failure latch and passes news on.
  void Service();

  // Sockets to poll for input; -1 where the neighbour has gone.
  std::array<int, 2> PollFds();

  // Tells all ranks of a failure that began here.
  void Spread(const Status& status);

  // Tells all ranks that this one leaves in good order, then closes both connections.
  void Goodbye(uint64_t next_sequence);

  // This rank begins the operation.
  void NoteBegun(uint64_t sequence) { num_begun_.store(sequence + 1, std::memory_order_relaxed); }

  // Asks all ranks how far they have come; the number of the call. One that was made a moment ago,
  // here or elsewhere, will do.
  uint32_t CallRoll();

  // What is known of an operation by the answers to a call.
  Attendance AttendanceOf(uint64_t sequence, uint32_t call);

  std::optional<Leaver> leaver() const;
  bool has_leaver() const { return leaver_rank_.load(std::memory_order_acquire) >= 0; }

 private:
  static constexpr size_t kMaxReasonBytes = 1024;
  static constexpr uint32_t kMagic = 0x53504c31;  // "SPL1"

  enum class MessageType : uint8_t { kGoodbye = 0, kFailure = 1, kRollCall = 2, kAnswer = 3 };

  // The wire format; followed by text_bytes of text. next_sequence: the first operation in which
  // `rank` takes no part any more (kGoodbye), or that it has not begun (kAnswer).
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
