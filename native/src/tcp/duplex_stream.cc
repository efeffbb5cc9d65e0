#include "sparkdl/tcp/duplex_stream.h"

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
constexpr size_t kPackedBytes = size_t{128} * 1024;
// Most bytes that one call moves: combining and sending on should not wait for long.
constexpr size_t kCallBytes = size_t{1024} * 1024;
constexpr size_t kMaxVectors = 64;

template <typename Byte>
size_t FillVectors(PieceCursor<Byte> cursor, size_t longest, std::array<iovec, kMaxVectors>& out) {
  size_t num_vectors = 0;
  while (longest > 0 && cursor.remaining() > 0 && num_vectors < kMaxVectors) {
    const auto piece = cursor.Peek(longest);
    // iovec serves both directions and has no const; sendmsg does not write.
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
  return guard.NewsOr(
      Status(StatusCode::kRankLost,
             "rank " + std::to_string(rank) + " was lost during " + guard.Summary() + ": " + how));
}

}  // namespace

struct DuplexStream::Progress {
  explicit Progress(const DuplexTransfer& transfer)
      : outgoing(transfer.outgoing),
        incoming(transfer.incoming),
        credit(transfer.outgoing_credit),
        combine_with(transfer.combine_with),
        wire(transfer.wire) {}

  // In bytes of memory, like the credit and the cursors.
  size_t Sendable() const { return std::min(credit, outgoing.remaining()); }
  bool wants_to_send() const { return Sendable() > 0 || packed.bytes > 0; }
  bool is_done() const {
    return outgoing.remaining() == 0 && packed.bytes == 0 && incoming.remaining() == 0;
  }
  bool is_staged() const { return combine_with != nullptr || wire != nullptr; }

  // Size of one number that is received and staged: in memory, and on the wire.
  size_t unit_in_memory() const {
    return wire != nullptr ? sizeof(float) : combine_with->accumulator_bytes;
  }
  size_t unit_on_wire() const { return wire != nullptr ? wire->bytes() : unit_in_memory(); }

  PieceCursor<const std::byte> outgoing;
  PieceCursor<std::byte> incoming;
  size_t credit;
  const ReduceKernels* combine_with;
  const WireFormat* wire;
  ConstPiece packed;  // the rest of packed_
  size_t staged = 0;
};

DuplexStream::DuplexStream(GuardedSocket to_next, GuardedSocket from_previous, int next_rank,
                           int previous_rank)
    : to_next_(std::move(to_next)),
      from_previous_(std::move(from_previous)),
      next_rank_(next_rank),
      previous_rank_(previous_rank) {}

Status DuplexStream::Run(const DuplexTransfer& transfer, OperationGuard& guard) {
  Progress progress(transfer);
  if (progress.is_staged()) staging_.resize(kStagingBytes);
  while (!progress.is_done()) {
    if (guard.has_failure()) return guard.Check();
    bool has_moved = false;
    SPARKDL_RETURN_IF_ERROR(SendSome(progress, guard, has_moved));
    SPARKDL_RETURN_IF_ERROR(ReceiveSome(progress, guard, has_moved));
    if (has_moved) {
      guard.NoteProgress();
    } else {
      SPARKDL_RETURN_IF_ERROR(Sleep(progress, guard));
    }
  }
  return {};
}

Status DuplexStream::SendSome(Progress& progress, OperationGuard& guard, bool& has_moved) {
  if (progress.wire != nullptr && progress.packed.bytes == 0) {
    const size_t bytes = PackSome(progress);
    progress.packed = {packed_.data(), bytes};
  }
  if (!progress.wants_to_send()) return {};
  std::array<iovec, kMaxVectors> vectors;
  msghdr message{};
  message.msg_iov = vectors.data();
  if (progress.wire != nullptr) {
    const ConstPieces packed = {progress.packed};
    message.msg_iovlen = FillVectors(PieceCursor<const std::byte>(packed), kCallBytes, vectors);
  } else {
    const size_t sendable = std::min(progress.Sendable(), kCallBytes);
    message.msg_iovlen = FillVectors(progress.outgoing, sendable, vectors);
  }
  const ssize_t sent = ::sendmsg(to_next_.get(), &message, MSG_NOSIGNAL);
  if (sent < 0) {
    if (WouldBlock() || errno == EINTR) return {};
    return Lost(next_rank_, std::string("sending to it failed: ") + std::strerror(errno), guard);
  }
  has_moved = has_moved || sent > 0;
  const auto bytes = static_cast<size_t>(sent);
  if (progress.wire != nullptr) {
    progress.packed = {progress.packed.data + bytes, progress.packed.bytes - bytes};
  } else {
    progress.outgoing.Advance(bytes);
    progress.credit -= bytes;
  }
  return {};
}

// Packs the numbers that may be sent, as far as there is room; returns the number of packed bytes.
size_t DuplexStream::PackSome(Progress& progress) {
  packed_.resize(kPackedBytes);
  const size_t room = kPackedBytes / progress.wire->bytes();
  size_t done = 0;
  while (done < room) {
    const size_t longest = std::min(room - done, progress.Sendable() / sizeof(float));
    const ConstPiece piece = progress.outgoing.Peek(longest * sizeof(float));
    if (piece.bytes == 0) break;
    const size_t count = piece.bytes / sizeof(float);
    progress.wire->Pack(packed_.data() + done * progress.wire->bytes(), piece.data, count);
    progress.outgoing.Advance(piece.bytes);
    progress.credit -= piece.bytes;
    done += count;
  }
  return done * progress.wire->bytes();
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
  if (!progress.is_staged()) {
    PieceCursor<std::byte> ahead = progress.incoming;
    for (size_t left = kCallBytes;
         left > 0 && ahead.remaining() > 0 && window.size() < kMaxVectors;) {
      window.push_back(ahead.Peek(left));
      left -= window.back().bytes;
      ahead.Advance(window.back().bytes);
    }
  } else {
    const size_t coming =
        progress.incoming.remaining() / progress.unit_in_memory() * progress.unit_on_wire();
    const size_t room = std::min(kStagingBytes, coming) - progress.staged;
    window.push_back({staging_.data() + progress.staged, room});
  }
  size_t received = 0;
  SPARKDL_RETURN_IF_ERROR(ReceiveInto(window, guard, received));
  if (received == 0) return {};
  has_moved = true;
  if (!progress.is_staged()) {
    progress.incoming.Advance(received);
    progress.credit += received;
  } else {
    progress.staged += received;
    TakeStaged(progress);
  }
  return {};
}

// Takes the whole numbers that are staged; the bytes of an incomplete one stay until more arrives.
void DuplexStream::TakeStaged(Progress& progress) {
  const size_t unit = progress.unit_in_memory();
  const size_t num_whole = progress.staged / progress.unit_on_wire();
  const std::byte* next = staging_.data();
  for (size_t left = num_whole; left > 0;) {
    const Piece piece = progress.incoming.Peek(left * unit);
    const size_t count = piece.bytes / unit;
    const std::byte* numbers = next;
    if (progress.wire != nullptr) {
      std::byte* const unpacked =
          progress.combine_with != nullptr ? Unpacked(piece.bytes) : piece.data;
      progress.wire->Unpack(unpacked, next, count);
      numbers = unpacked;
    }
    if (progress.combine_with != nullptr) {
      progress.combine_with->combine(piece.data, numbers, count);
    }
    progress.incoming.Advance(piece.bytes);
    next += count * progress.unit_on_wire();
    left -= count;
  }
  progress.credit += num_whole * unit;
  const size_t taken = num_whole * progress.unit_on_wire();
  std::memmove(staging_.data(), staging_.data() + taken, progress.staged - taken);
  progress.staged -= taken;
}

std::byte* DuplexStream::Unpacked(size_t bytes) {
  if (unpacked_.size() < bytes) unpacked_.resize(bytes);
  return unpacked_.data();
}

Status DuplexStream::Sleep(const Progress& progress, OperationGuard& guard) {
  SPARKDL_RETURN_IF_ERROR(guard.Check());
  SPARKDL_RETURN_IF_ERROR(guard.HeedStall());
  const auto slice = guard.Slice();
  if (slice.count() == 0) return guard.TimedOut();
  const bool wants_input = progress.incoming.remaining() > 0;
  const bool wants_output = progress.wants_to_send();
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

}  // namespace sparkdl
