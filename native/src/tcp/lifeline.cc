#include "sparkdl/tcp/lifeline.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace sparkdl {
namespace {

// A roll call is answered within a millisecond or so, unless ranks are frozen.
constexpr std::chrono::milliseconds kCallIsFresh{100};

// Time for a packet to be sent again.
constexpr std::chrono::milliseconds kDeliveryGrace{1000};

// Shortens text without cutting a UTF-8 character.
std::string Shortened(const std::string& text, size_t longest) {
  if (text.size() <= longest) return text;
  size_t end = longest;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return text.substr(0, end);
}

bool IsFailure(StatusCode code) {
  return code == StatusCode::kFailed || code == StatusCode::kTimeout ||
         code == StatusCode::kAborted || code == StatusCode::kRankLost;
}

// Waits until the peer's kernel has received everything that was sent on a TCP socket, or until the
// peer has closed the connection. If the socket were closed before, a message of the peer that
// crosses ours would be answered with a reset, and our message, if lost on the way, would never be
// sent again.
void AwaitDelivery(int fd, Clock::time_point end) {
  int domain = 0;
  socklen_t length = sizeof(domain);
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0 || domain == AF_UNIX) return;
  int unacknowledged = 0;
  while (::ioctl(fd, SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0 && Clock::now() < end) {
    pollfd polled{fd, POLLRDHUP, 0};
    if (::poll(&polled, 1, 1) > 0) return;
  }
}

}  // namespace

Lifeline::Lifeline(int rank, int world_size, GuardedSocket to_next, GuardedSocket from_previous,
                   FailureLatch& failure)
    : rank_(rank), failure_(failure), roll_book_(world_size) {
  links_[0].fd = std::move(to_next);
  links_[0].peer = (rank + 1) % world_size;
  links_[1].fd = std::move(from_previous);
  links_[1].peer = (rank + world_size - 1) % world_size;
}

std::array<int, 2> Lifeline::PollFds() {
  const std::scoped_lock lock(mutex_);
  return {links_[0].fd.get(), links_[1].fd.get()};
}

void Lifeline::Service() {
  const std::scoped_lock lock(mutex_);
  for (Link& link : links_) {
    if (link.fd.valid()) Drain(link);
  }
}

void Lifeline::Drain(Link& link) {
  while (link.fd.valid()) {
    const ssize_t got = ::recv(link.fd.get(), link.buffer.data() + link.filled,
                               link.buffer.size() - link.filled, MSG_DONTWAIT);
    if (got > 0) {
      link.filled += static_cast<size_t>(got);
      while (Parse(link)) {
      }
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    const std::string how = got == 0 ? "it closed its connection without a goodbye"
                                     : std::string("its connection broke: ") + std::strerror(errno);
    if (link.said_goodbye) {
      link.fd.Reset();
    } else {
      Lost(link, how);
    }
  }
}

// Takes one whole message from the front of the link's buffer. No value that a peer wrote is used
// as a size before it is compared with the size of the buffer.
bool Lifeline::Parse(Link& link) {
  if (!link.fd.valid() || link.filled < sizeof(Header)) return false;
  Header header{};
  std::memcpy(&header, link.buffer.data(), sizeof(header));
  const bool is_known = header.type == MessageType::kFailure ? IsFailure(header.code)
                                                             : header.type <= MessageType::kAnswer;
  if (header.magic != kMagic || header.text_bytes > kMaxReasonBytes || !is_known ||
      !roll_book_.IsRank(header.rank)) {
    Lost(link, "it sent something that is not a lifeline message");
    return false;
  }
  const size_t bytes = sizeof(Header) + header.text_bytes;
  if (link.filled < bytes) return false;
  const std::string text(reinterpret_cast<const char*>(link.buffer.data()) + sizeof(Header),
                         header.text_bytes);
  std::memmove(link.buffer.data(), link.buffer.data() + bytes, link.filled - bytes);
  link.filled -= bytes;
  Act(link, header, text.c_str());
  return true;
}

void Lifeline::Act(Link& link, const Header& header, const char* text) {
  switch (header.type) {
    case MessageType::kGoodbye:
      if (header.rank == link.peer) link.said_goodbye = true;
      NoteLeaver(header.rank, header.next_sequence);
      return;
    case MessageType::kFailure:
      // The text was composed by the rank on which the failure began, and is suitable for every
      // other rank.
      if (failure_.Set(Status(header.code, text))) SendFailure(header.code, header.rank, text);
      return;
    case MessageType::kRollCall:
      PassOnCall(header.call);
      return;
    case MessageType::kAnswer:
      PassOnAnswer(header.rank, header.call, header.next_sequence);
      return;
  }
}

uint32_t Lifeline::CallRoll() {
  const std::scoped_lock lock(mutex_);
  if (Clock::now() - last_call_time_ > kCallIsFresh) PassOnCall(roll_book_.last_call() + 1);
  return roll_book_.last_call();
}

Attendance Lifeline::AttendanceOf(uint64_t sequence, uint32_t call) {
  const std::scoped_lock lock(mutex_);
  return roll_book_.Of(sequence, call);
}

// Messages go to both neighbours, and end where both directions around the ring meet, because they
// are known there.
void Lifeline::PassOnCall(uint32_t call) {
  if (!roll_book_.NoteCall(call)) return;
  last_call_time_ = Clock::now();
  Send(Header{.magic = kMagic,
              .type = MessageType::kRollCall,
              .code = StatusCode::kOk,
              .text_bytes = 0,
              .rank = rank_,
              .call = call,
              .next_sequence = 0},
       "");
  PassOnAnswer(rank_, call, num_begun_.load(std::memory_order_relaxed));
}

void Lifeline::PassOnAnswer(int rank, uint32_t call, uint64_t num_begun) {
  if (!roll_book_.NoteAnswer(rank, call, num_begun)) return;
  Send(Header{.magic = kMagic,
              .type = MessageType::kAnswer,
              .code = StatusCode::kOk,
              .text_bytes = 0,
              .rank = rank,
              .call = call,
              .next_sequence = num_begun},
       "");
}

void Lifeline::Lost(Link& link, const std::string& how) {
  link.fd.Reset();
  const std::string text = "rank " + std::to_string(link.peer) + " was lost: " + how;
  if (failure_.Set(Status(StatusCode::kRankLost, text))) {
    SendFailure(StatusCode::kRankLost, link.peer, text);
  }
}

void Lifeline::NoteLeaver(int rank, uint64_t next_sequence) {
  if (leaver_rank_.load(std::memory_order_acquire) >= 0) return;
  leaver_next_sequence_.store(next_sequence, std::memory_order_relaxed);
  leaver_rank_.store(rank, std::memory_order_release);
  // The leaver closes its connections, so the others learn of it only if the message is passed on.
  Send(Header{.magic = kMagic,
              .type = MessageType::kGoodbye,
              .code = StatusCode::kOk,
              .text_bytes = 0,
              .rank = rank,
              .call = 0,
              .next_sequence = next_sequence},
       "");
}

std::optional<Lifeline::Leaver> Lifeline::leaver() const {
  const int rank = leaver_rank_.load(std::memory_order_acquire);
  if (rank < 0) return std::nullopt;
  return Leaver{.rank = rank,
                .next_sequence = leaver_next_sequence_.load(std::memory_order_relaxed)};
}

void Lifeline::SendFailure(StatusCode code, int origin, const std::string& text) {
  if (spread_) return;
  spread_ = true;
  const std::string reason = Shortened(text, kMaxReasonBytes);
  Send(Header{.magic = kMagic,
              .type = MessageType::kFailure,
              .code = code,
              .text_bytes = static_cast<uint16_t>(reason.size()),
              .rank = origin,
              .call = 0,
              .next_sequence = 0},
       reason);
}

// A link carries one goodbye per leaving rank, one failure in its life, and one message per rank
// and roll call, far less than the buffer of a socket. A link that takes no more is as good as lost
// and must not block this rank. After a message that was sent only in part, later ones could not be
// told from its rest.
void Lifeline::Send(const Header& header, const std::string& text) {
  std::array<std::byte, sizeof(Header) + kMaxReasonBytes> message{};
  std::memcpy(message.data(), &header, sizeof(header));
  const size_t text_bytes = std::min(text.size(), kMaxReasonBytes);
  std::memcpy(message.data() + sizeof(header), text.data(), text_bytes);
  const size_t bytes = sizeof(header) + text_bytes;
  for (Link& link : links_) {
    if (!link.fd.valid() || link.is_clogged) continue;
    ssize_t sent = 0;
    do {
      sent = ::send(link.fd.get(), message.data(), bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    link.is_clogged = sent != static_cast<ssize_t>(bytes);
  }
}

void Lifeline::Spread(const Status& status) {
  const std::scoped_lock lock(mutex_);
  SendFailure(status.code(), rank_, status.ToString());
}

void Lifeline::Goodbye(uint64_t next_sequence) {
  const std::scoped_lock lock(mutex_);
  Send(Header{.magic = kMagic,
              .type = MessageType::kGoodbye,
              .code = StatusCode::kOk,
              .text_bytes = 0,
              .rank = rank_,
              .call = 0,
              .next_sequence = next_sequence},
       "");
  const auto end = Clock::now() + kDeliveryGrace;
  for (Link& link : links_) {
    if (link.fd.valid() && !link.is_clogged) AwaitDelivery(link.fd.get(), end);
    link.fd.Reset();
  }
}

}  // namespace sparkdl
