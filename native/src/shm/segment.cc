#include "sparkdl/shm/segment.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>

namespace sparkdl {
namespace {

constexpr size_t kLineStride = 128;
constexpr size_t kPage = 4096;

size_t FlagBytes(int local_size) {
  return (kLineStride * static_cast<size_t>(local_size) + kPage - 1) / kPage * kPage;
}

}  // namespace

size_t Segment::BytesFor(int local_size) {
  return FlagBytes(local_size) + static_cast<size_t>(local_size) * kSlotsPerRank * kSlotBytes;
}

Result<std::shared_ptr<Segment>> Segment::Attach(int fd, int local_size) {
  const size_t bytes = BytesFor(local_size);
  struct stat info{};
  if (::fstat(fd, &info) != 0) {
    return Status::FromErrno("cannot read the size of the shared segment", errno);
  }
  if (info.st_size < 0 || static_cast<size_t>(info.st_size) < bytes) {
    return Status(StatusCode::kInvalidArgument,
                  "the shared segment has " + std::to_string(info.st_size) + " bytes, " +
                      std::to_string(local_size) + " ranks need segment_bytes(" +
                      std::to_string(local_size) + ") = " + std::to_string(bytes));
  }
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return Status::FromErrno("cannot map the shared segment", errno);
  return std::shared_ptr<Segment>(new Segment(static_cast<std::byte*>(base), bytes, local_size));
}

Segment::~Segment() { ::munmap(base_, bytes_); }

FlagLine& Segment::line(int local_rank) const {
  return *reinterpret_cast<FlagLine*>(base_ + kLineStride * static_cast<size_t>(local_rank));
}

std::byte* Segment::slot(int local_rank, int which) const {
  const size_t index = static_cast<size_t>(local_rank) * kSlotsPerRank + static_cast<size_t>(which);
  return base_ + FlagBytes(local_size_) + index * kSlotBytes;
}

}  // namespace sparkdl
