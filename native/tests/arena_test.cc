// allreduce of arrays in memory that all ranks of the host map.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "reference.h"
#include "requests.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

constexpr size_t kPartBytes = size_t{4} * 1024 * 1024;

// Memory of one arena for a world whose ranks are all on one host.
class ArenaMemory {
 public:
  explicit ArenaMemory(int local_size) : fd_(::memfd_create("arena", MFD_CLOEXEC)) {
    CHECK_EQ(::ftruncate(fd_.get(), static_cast<off_t>(kPartBytes) * local_size), 0);
  }
  std::shared_ptr<const Arena> AddTo(Communicator& communicator) const {
    auto arena = communicator.AddArena(fd_.get(), kPartBytes);
    CHECK_OK(arena.status());
    return arena.value();
  }

 private:
  UniqueFd fd_;
};

void OnOneHost(const std::function<void(Communicator&, std::byte* part)>& function) {
  for (const int size : {1, 2, 3, 4}) {
    World world(std::vector<int>(static_cast<size_t>(size), 0));
    world.OpenAll();
    const ArenaMemory memory(size);
    world.Run([&](Communicator& communicator, int) {
      const auto arena = memory.AddTo(communicator);
      function(communicator, arena->own_part());
    });
  }
}

// Reduces arrays with these numbers of elements. The first one lies at `data`. Returns whether
// the operation was found to lie in an arena.
bool ReduceAt(Communicator& communicator, std::byte* data, Dtype dtype, ReduceOp op,
              const std::vector<size_t>& counts, const Scales& scales = {}) {
  Operation operation = AllReduceOf(nullptr, 0, dtype, op);
  operation.prescale = scales.before;
  operation.postscale = scales.after;
  std::byte* next = data;
  for (const size_t count : counts) {
    const Bytes elements = Elements(dtype, communicator.rank(), operation.count, count);
    std::ranges::copy(elements, next);
    operation.group.push_back({next, elements.size()});
    next += elements.size() + 5;
    operation.count += count;
  }
  communicator.Locate(operation);
  CHECK_OK(communicator.Run(operation, kTimeout, nullptr));
  size_t first = 0;
  for (const Piece& array : operation.group) {
    const size_t count = array.bytes / BytesOf(dtype);
    const Bytes expected = Reduced(dtype, op, communicator.world_size(), first, count, scales);
    CHECK(std::ranges::equal(expected, std::span(array.data, array.bytes)));
    first += count;
  }
  return operation.arena != nullptr;
}

TEST(ArraysInAnArenaAreReducedInPlace) {
  OnOneHost([](Communicator& communicator, std::byte* part) {
    for (const Dtype dtype : kDtypes) {
      for (const ReduceOp op : kReduceOps) {
        if (!CanReduce(dtype, op)) continue;
        CHECK(ReduceAt(communicator, part + 8, dtype, op, {1000, 1, 0, 30'001}));
        CHECK(ReduceAt(communicator, part, dtype, op, {70, 3}, {.before = 0.5, .after = 0.75}));
      }
    }
  });
}

TEST(ArraysAtOtherPlacesOnSomeRanksAreReduced) {
  OnOneHost([](Communicator& communicator, std::byte* part) {
    const bool is_odd = communicator.rank() % 2 != 0;
    Bytes outside(100'000);
    for (const size_t count : {5, 20'000}) {
      CHECK(ReduceAt(communicator, is_odd ? part : part + 64, Dtype::kFloat32, ReduceOp::kSum,
                     {count}));
      CHECK_EQ(ReduceAt(communicator, is_odd ? part : outside.data(), Dtype::kFloat32,
                        ReduceOp::kSum, {count}, {.before = 2.0, .after = 1.0}),
               is_odd);
      CHECK(ReduceAt(communicator, part, Dtype::kFloat32, ReduceOp::kSum, {count}));
    }
  });
}

TEST(JoinedRankContributesZerosInsteadOfItsPart) {
  OnOneHost([](Communicator& communicator, std::byte* part) {
    auto* const numbers = reinterpret_cast<float*>(part);
    std::fill_n(numbers, 50'000, 1.0F);
    if (communicator.rank() != 0 || communicator.world_size() == 1) {
      const auto others = static_cast<float>(std::max(1, communicator.world_size() - 1));
      Operation operation = AllReduceOf(numbers, 50'000);
      communicator.Locate(operation);
      CHECK(operation.arena != nullptr);
      CHECK_OK(communicator.Run(operation, kTimeout, nullptr));
      CHECK_EQ(numbers[0], others);
      CHECK_EQ(numbers[49'999], others);
    }
    int last = -1;
    CHECK_OK(communicator.Join(kTimeout, nullptr, last));
    CHECK_EQ(last, communicator.world_size() - 1);
    if (communicator.rank() == 0 && communicator.world_size() > 1) CHECK_EQ(numbers[0], 1.0F);
  });
}

TEST(MismatchLeavesAnArenaUnchanged) {
  OnOneHost([](Communicator& communicator, std::byte* part) {
    if (communicator.world_size() == 1) return;
    auto* const numbers = reinterpret_cast<float*>(part);
    std::fill_n(numbers, 50'000, 1.0F);
    Operation operation = AllReduceOf(numbers, communicator.rank() == 0 ? 50'000 : 49'999);
    operation.prescale = 3;
    communicator.Locate(operation);
    const Status status = communicator.Run(operation, kTimeout, nullptr);
    CHECK(status.code() == StatusCode::kMismatch);
    CHECK_CONTAINS(status.ToString(), "rank 0 said allreduce of 50000 float32 by sum, prescale 3;");
    CHECK(std::all_of(numbers, numbers + 50'000, [](float number) { return number == 1.0F; }));
  });
}

TEST(QueuedOperationKeepsItsArena) {
  OnOneHost([](Communicator& communicator, std::byte*) {
    std::vector<std::shared_ptr<PendingOperation>> pending;
    {
      const ArenaMemory memory(communicator.world_size());
      // Each rank maps its own memory, so its peers' arrays remain zero.
      const auto arena = memory.AddTo(communicator);
      for (int i = 0; i < 20; ++i) {
        Operation operation = AllReduceOf(
            reinterpret_cast<float*>(arena->own_part()) + static_cast<size_t>(i) * 20'000, 20'000);
        communicator.Locate(operation);
        CHECK(operation.arena != nullptr);
        pending.push_back(communicator.Submit(operation, kTimeout));
      }
    }
    for (const auto& operation : pending) {
      CHECK_OK(Communicator::Wait(*operation, kTimeout, nullptr));
    }
  });
}

TEST(MemoryThatIsTooSmallIsRefused) {
  World world({0, 0});
  Communicator& communicator = world.Open(0);
  const UniqueFd small(::memfd_create("small", MFD_CLOEXEC));
  CHECK_CONTAINS(communicator.AddArena(small.get(), kPartBytes).status().ToString(),
                 "the arena has 0 bytes, 2 ranks need " + std::to_string(2 * kPartBytes));
}

TEST(ArenaIsNotUsedAcrossHosts) {
  World world({0, 1});
  world.OpenAll();
  world.Run([](Communicator& communicator, int rank) {
    const ArenaMemory memory(1);
    const auto arena = memory.AddTo(communicator);
    std::byte* const data = arena->own_part() + static_cast<ptrdiff_t>(rank) * 64;
    CHECK(!ReduceAt(communicator, data, Dtype::kFloat32, ReduceOp::kSum, {100, 50'000}));
  });
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
