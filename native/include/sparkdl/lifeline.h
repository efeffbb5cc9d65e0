// News of life and death, on a ring of sockets over all ranks that carries nothing else.
#ifndef SPARKDL_LIFELINE_H_
#define SPARKDL_LIFELINE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "sparkdl/failure_latch.h"
#include "sparkdl/fork_guard.h"
#include "sparkdl/status.h"

namespace sparkdl {

// A connection that ends without a goodbye means that the neighbour died. Whoever learns of a
// failure first tells both neighbours, who pass it on, so it reaches everyone in at most half the
// ring.
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
  Lifeline(int rank, int next_rank, int previous_rank, GuardedSocket to_next,
           GuardedSocket from_previous, FailureLatch& failure);

  // Reads what has come, without blocking; sets the failure latch and passes news on.
  void Service();

  // Sockets to poll for input; -1 where the neighbour has gone.
  std::array<int, 2> PollFds();

  // Tells all ranks of a failure that began here.
  void Spread(const Status& status);

  // Tells all ranks that this one leaves in good order, then closes both connections.
  void Goodbye(uint64_t next_sequence);

  std::optional<Leaver> leaver() const;
  bool has_leaver() const { return leaver_rank_.load(std::memory_order_acquire) >= 0; }

 private:
  static constexpr size_t kMaxReasonBytes = 1024;
  static constexpr uint32_t kMagic = 0x53504c31;  // "SPL1"

  enum class MessageType : uint8_t { kGoodbye = 0, kFailure = 1 };

  // The wire format; followed by text_bytes of text.
  struct Header {
    uint32_t magic;
    MessageType type;
    StatusCode code;
    uint16_t text_bytes;
    int32_t rank;
    uint32_t reserved;
    uint64_t next_sequence;
  };
  static_assert(sizeof(Header) == 24);

  struct Link {
    GuardedSocket fd;
    int peer = -1;
    bool said_goodbye = false;
    size_t filled = 0;
    std::array<std::byte, sizeof(Header) + kMaxReasonBytes> buffer{};
  };

  void Drain(Link& link);
  bool Parse(Link& link);
  void Act(Link& link, const Header& header, const char* text);
  void Lost(Link& link, const std::string& how);
  void NoteLeaver(int rank, uint64_t next_sequence);
  void Send(const Header& header, const std::string& text);
  void SendFailure(StatusCode code, int origin, const std::string& text);

  const int rank_;
  FailureLatch& failure_;
  std::mutex mutex_;  // guards links_
  std::array<Link, 2> links_;
  bool spread_ = false;
  std::atomic<int> leaver_rank_{-1};
  std::atomic<uint64_t> leaver_next_sequence_{0};
};

}  // namespace sparkdl

#endif  // SPARKDL_LIFELINE_H_
