#include "sparkdl/duplex_stream.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace sparkdl {
namespace {

constexpr size_t kStagingBytes = size_t{256} * 1024;
// One call moves at most so much: combining and sending on should not wait for long.
constexpr size_t kCallBytes = size_t{1024} * 1024;
constexpr size_t kMaxVectors = 64;

template <typename Byte>
size_t FillVectors(PieceCursor<Byte> cursor, size_t longest, std::array<iovec, kMaxVectors>& out) {
  size_t num_vectors = 0;
  while (longest > 0 && cursor.remaining() > 0 && num_vectors < kMaxVectors) {
    const auto piece = cursor.Peek(longest);
    // iovec serves both directions and knows no const; sendmsg does not write.
    out[num_vectors].iov_base = const_cast<std::byte*>(piece.data);
    out[num_vectors].iov_len = piece.bytes;
    ++num_vectors;
    longest -= piece.bytes;
    cursor.Advance(piece.bytes);
  }
  return num_vectors;
}

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK; }

Status Lost(int rank, const std::string& how, OperationGuard& guard) {
  return guard.NewsOr(Status(StatusCode::kRankLost, "rank " + std::to_string(rank) +
                                                        " was lost during " +
                                                        Describe(guard.signature()) + ": " + how));
}

}  // namespace

struct DuplexStream::Progress {
  explicit Progress(const DuplexTransfer& transfer)
      : outgoing(transfer.outgoing),
        incoming(transfer.incoming),
        credit(transfer.outgoing_credit),
        combine_with(transfer.combine_with),
        begins_operation(transfer.begins_operation) {}

  size_t Sendable() const { return std::min(credit, outgoing.remaining()); }
  bool is_done() const { return outgoing.remaining() == 0 && incoming.remaining() == 0; }

  PieceCursor<const std::byte> outgoing;
  PieceCursor<std::byte> incoming;
  size_t credit;
  const ReduceKernels* combine_with;
  bool begins_operation;
  size_t staged = 0;
};

DuplexStream::DuplexStream(GuardedSocket to_next, GuardedSocket from_previous, int next_rank,
                           int previous_rank, bool previous_is_alone)
    : to_next_(std::move(to_next)),
      from_previous_(std::move(from_previous)),
      next_rank_(next_rank),
      previous_rank_(previous_rank),
      previous_is_alone_(previous_is_alone) {}

Status DuplexStream::Run(const DuplexTransfer& transfer, OperationGuard& guard) {
  Progress progress(transfer);
  if (transfer.combine_with != nullptr) staging_.resize(kStagingBytes);
  while (!progress.is_done()) {
    if (guard.has_failure()) return guard.Check();
    bool has_moved = false;
    SPARKDL_RETURN_IF_ERROR(SendSome(progress, guard, has_moved));
    SPARKDL_RETURN_IF_ERROR(ReceiveSome(progress, guard, has_moved));
    if (!has_moved) SPARKDL_RETURN_IF_ERROR(Sleep(progress, guard));
  }
  return {};
}

Status DuplexStream::SendSome(Progress& progress, OperationGuard& guard, bool& has_moved) {
  const size_t sendable = std::min(progress.Sendable(), kCallBytes);
  if (sendable == 0) return {};
  std::array<iovec, kMaxVectors> vectors;
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = FillVectors(progress.outgoing, sendable, vectors);
  const ssize_t sent = ::sendmsg(to_next_.get(), &message, MSG_NOSIGNAL);
  if (sent < 0) {
    if (WouldBlock() || errno == EINTR) return {};
    return Lost(next_rank_, std::string("sending to it failed: ") + std::strerror(errno), guard);
  }
  progress.outgoing.Advance(static_cast<size_t>(sent));
  progress.credit -= static_cast<size_t>(sent);
  has_moved = has_moved || sent > 0;
  return {};
}

Status DuplexStream::ReceiveInto(Pieces& window, OperationGuard& guard, size_t& received) {
  std::array<iovec, kMaxVectors> vectors;
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = FillVectors(PieceCursor<std::byte>(window), kCallBytes, vectors);
  const ssize_t got = ::recvmsg(from_previous_.get(), &message, 0);
  if (got < 0) {
    if (WouldBlock() || errno == EINTR) return {};
    return Lost(previous_rank_, std::string("receiving from it failed: ") + std::strerror(errno),
                guard);
  }
  if (got == 0) return Lost(previous_rank_, "it closed its connection", guard);
  received = static_cast<size_t>(got);
  return {};
}

Status DuplexStream::ReceiveSome(Progress& progress, OperationGuard& guard, bool& has_moved) {
  if (progress.incoming.remaining() == 0) return {};
  Pieces window;
  if (progress.combine_with == nullptr) {
    PieceCursor<std::byte> ahead = progress.incoming;
    for (size_t left = kCallBytes;
         left > 0 && ahead.remaining() > 0 && window.size() < kMaxVectors;) {
      window.push_back(ahead.Peek(left));
      left -= window.back().bytes;
      ahead.Advance(window.back().bytes);
    }
  } else {
    const size_t room = std::min(kStagingBytes, progress.incoming.remaining()) - progress.staged;
    window.push_back({staging_.data() + progress.staged, room});
  }
  size_t received = 0;
  SPARKDL_RETURN_IF_ERROR(ReceiveInto(window, guard, received));
  if (received == 0) return {};
  has_moved = true;
  if (progress.combine_with == nullptr) {
    progress.incoming.Advance(received);
    progress.credit += received;
  } else {
    progress.staged += received;
    CombineStaged(progress);
  }
  return {};
}

// Combines the whole accumulators that are staged; the bytes of a torn one stay for the next time.
void DuplexStream::CombineStaged(Progress& progress) {
  const size_t unit = progress.combine_with->accumulator_bytes;
  const size_t whole = progress.staged / unit * unit;
  size_t done = 0;
  while (done < whole) {
    const Piece piece = progress.incoming.Peek(whole - done);
    progress.combine_with->combine(piece.data, staging_.data() + done, piece.bytes / unit);
    progress.incoming.Advance(piece.bytes);
    done += piece.bytes;
  }
  progress.credit += whole;
  std::memmove(staging_.data(), staging_.data() + whole, progress.staged - whole);
  progress.staged -= whole;
}

Status DuplexStream::Sleep(const Progress& progress, OperationGuard& guard) {
  SPARKDL_RETURN_IF_ERROR(guard.Check());
  const auto slice = guard.Slice();
  if (slice.count() == 0) return Missed(progress, guard);
  const bool wants_input = progress.incoming.remaining() > 0;
  const bool wants_output = progress.Sendable() > 0;
  const auto watched = guard.WatchFds();
  std::array<pollfd, 4> polled = {
      pollfd{wants_output ? to_next_.get() : -1, POLLOUT, 0},
      pollfd{wants_input ? from_previous_.get() : -1, POLLIN, 0},
      pollfd{watched[0], POLLIN, 0},
      pollfd{watched[1], POLLIN, 0},
  };
  const int ready = ::poll(polled.data(), polled.size(), static_cast<int>(slice.count()));
  if (ready < 0 && errno == EINTR) guard.NoteSignal();
  return {};
}

Status DuplexStream::Missed(const Progress& progress, OperationGuard& guard) const {
  const std::string previous = "rank " + std::to_string(previous_rank_);
  if (progress.incoming.remaining() == 0) {
    return guard.TimedOutUnlessTold("rank " + std::to_string(next_rank_) + " took no more data");
  }
  if (!progress.begins_operation) {
    return guard.TimedOutUnlessTold(
        previous + " had joined, but sent no more; a rank beyond it may be missing");
  }
  if (previous_is_alone_) return guard.TimedOut(previous + " had not joined");
  return guard.TimedOutUnlessTold(previous + " or another rank of its host had not joined");
}

}  // namespace sparkdl
