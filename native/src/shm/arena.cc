#include "sparkdl/shm/arena.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>

namespace sparkdl {
namespace {

// Parts begin at the boundaries of huge pages, if the system has them for shared memory.
constexpr size_t kPartUnit = size_t{2} * 1024 * 1024;

}  // namespace

size_t Arena::PartBytesFor(size_t bytes) { return (bytes + kPartUnit - 1) / kPartUnit * kPartUnit; }

Result<std::shared_ptr<const Arena>> Arena::Attach(int fd, size_t part_bytes, int local_rank,
                                                   int local_size, int number) {
  const size_t bytes = part_bytes * static_cast<size_t>(local_size);
  struct stat info{};
  if (::fstat(fd, &info) != 0) {
    return Status::FromErrno("cannot read the size of the arena", errno);
  }
  if (info.st_size < 0 || static_cast<size_t>(info.st_size) < bytes) {
    return Status(StatusCode::kInvalidArgument, "the arena has " + std::to_string(info.st_size) +
                                                    " bytes, " + std::to_string(local_size) +
                                                    " ranks need " + std::to_string(bytes));
  }
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return Status::FromErrno("cannot map the arena", errno);
  // Only advice: systems that keep shared memory in small pages continue to do so.
  static_cast<void>(::madvise(base, bytes, MADV_HUGEPAGE));
  return std::shared_ptr<const Arena>(
      new Arena(static_cast<std::byte*>(base), part_bytes, local_rank, local_size, number));
}

Arena::~Arena() { ::munmap(base_, part_bytes_ * static_cast<size_t>(local_size_)); }

}  // namespace sparkdl
