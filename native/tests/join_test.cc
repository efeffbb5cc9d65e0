// Ranks that run out of data take part with zeros until all ranks have joined.
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

int Join(Communicator& communicator) {
  int last = -1;
  CHECK_OK(communicator.Join(kTimeout, nullptr, last));
  return last;
}

void OnTopologiesOfSeveral(const std::function<void(Communicator&, int)>& function) {
  for (const auto& hosts : Topologies()) {
    if (hosts.size() == 1) continue;
    World world(hosts);
    world.OpenAll();
    world.Run(function);
  }
}

TEST(JoinedRanksContributeZerosToAllReduce) {
  OnTopologiesOfSeveral([](Communicator& communicator, int rank) {
    const int world_size = communicator.world_size();
    // Rank r has r batches; the ranks above b take part in batch b.
    for (int batch = 0; batch < rank; ++batch) {
      const auto expected = static_cast<float>(world_size - 1 - batch);
      std::vector<float> sum(batch % 2 == 0 ? 5 : 30'000, 1.0F);
      CHECK_OK(communicator.Run(AllReduceOf(sum.data(), sum.size()), kTimeout, nullptr));
      CHECK_EQ(sum.front(), expected);
      CHECK_EQ(sum.back(), expected);
      std::vector<float> average(7, 1.0F);
      Operation operation = AllReduceOf(average.data(), average.size(), ReduceOp::kAvg);
      operation.prescale = 2;
      operation.postscale = 8;
      CHECK_OK(communicator.Run(operation, kTimeout, nullptr));
      CHECK_EQ(average.back(), 2 * expected / static_cast<float>(world_size) * 8);
    }
    CHECK_EQ(Join(communicator), world_size - 1);
    RunTrial(communicator, Trials(communicator).AllReduce({}, 5));
  });
}

TEST(JoinedRanksContributeZerosToGroups) {
  OnTopologiesOfSeveral([](Communicator& communicator, int rank) {
    if (rank != 0) {
      std::vector<float> first(30'001, 1.0F);
      std::vector<float> second(3, 2.0F);
      Operation operation = AllReduceOf(nullptr, first.size() + second.size(), Dtype::kFloat32);
      operation.group = {{reinterpret_cast<std::byte*>(first.data()), first.size() * 4},
                         {nullptr, 0},
                         {reinterpret_cast<std::byte*>(second.data()), second.size() * 4}};
      CHECK_OK(communicator.Run(operation, kTimeout, nullptr));
      const auto others = static_cast<float>(communicator.world_size() - 1);
      CHECK_EQ(first.front(), others);
      CHECK_EQ(first.back(), others);
      CHECK_EQ(second.back(), 2 * others);
    }
    CHECK_EQ(Join(communicator), communicator.world_size() - 1);
  });
}

TEST(JoinedRanksContributeZerosToReduceScatterAndAllGather) {
  OnTopologiesOfSeveral([](Communicator& communicator, int rank) {
    const auto world_size = static_cast<size_t>(communicator.world_size());
    if (rank != 1) {
      std::vector<int32_t> blocks(11 * world_size, 3);
      std::vector<int32_t> block(11);
      CHECK_OK(communicator.Run(
          Between(OpKind::kReduceScatter, reinterpret_cast<const std::byte*>(blocks.data()),
                  reinterpret_cast<std::byte*>(block.data()), 11, Dtype::kInt32),
          kTimeout, nullptr));
      CHECK_EQ(block.front(), 3 * (communicator.world_size() - 1));
      CHECK_EQ(block.back(), block.front());
      CHECK_OK(communicator.Run(
          Between(OpKind::kAllGather, reinterpret_cast<const std::byte*>(block.data()),
                  reinterpret_cast<std::byte*>(blocks.data()), 11, Dtype::kInt32),
          kTimeout, nullptr));
      for (size_t i = 0; i < blocks.size(); ++i) CHECK_EQ(blocks[i], i / 11 == 1 ? 0 : block[0]);
    }
    static_cast<void>(Join(communicator));
  });
}

TEST(JoinedRanksContributeZerosToGroupsOfBlocks) {
  OnTopologiesOfSeveral([](Communicator& communicator, int rank) {
    const auto world_size = static_cast<size_t>(communicator.world_size());
    if (rank != 1) {
      std::vector<int32_t> blocks(30'011 * world_size, 3);
      std::vector<int32_t> block(30'011);
      Operation operation;
      operation.kind = OpKind::kReduceScatter;
      operation.dtype = Dtype::kInt32;
      operation.count = block.size();
      operation.group_counts = Counts(world_size, 11);
      operation.group_counts.resize(2 * world_size, 30'000);
      auto* const whole = reinterpret_cast<std::byte*>(blocks.data());
      auto* const own = reinterpret_cast<std::byte*>(block.data());
      operation.group_input = {{whole, 44 * world_size},
                               {whole + 44 * world_size, 120'000 * world_size}};
      operation.group = {{own, 44}, {own + 44, 120'000}};
      CHECK_OK(communicator.Run(operation, kTimeout, nullptr));
      CHECK_EQ(block.front(), 3 * (communicator.world_size() - 1));
      CHECK_EQ(block.back(), block.front());
      operation.kind = OpKind::kAllGather;
      operation.group_input = {{own, 44}, {own + 44, 120'000}};
      operation.group = {{whole, 44 * world_size}, {whole + 44 * world_size, 120'000 * world_size}};
      CHECK_OK(communicator.Run(operation, kTimeout, nullptr));
      for (size_t i = 0; i < 11 * world_size; ++i) {
        CHECK_EQ(blocks[i], i / 11 == 1 ? 0 : block[0]);
      }
      CHECK_EQ(blocks[11 * world_size + 45'000], 0);
    }
    static_cast<void>(Join(communicator));
  });
}

TEST(JoinedRanksTakePartInBarriers) {
  OnTopologiesOfSeveral([](Communicator& communicator, int rank) {
    for (int i = 0; i < 3 * rank; ++i) {
      CHECK_OK(communicator.Run(BarrierRequest(), kTimeout, nullptr));
    }
    CHECK_EQ(Join(communicator), communicator.world_size() - 1);
  });
}

TEST(OperationThatNeedsDataOfAJoinedRankIsAMismatch) {
  OnTopologiesOfSeveral([](Communicator& communicator, int rank) {
    if (rank != 1) {
      std::byte data[4096]{};
      const auto world_size = static_cast<size_t>(communicator.world_size());
      std::vector<Operation> operations = {
          BroadcastOf(data, 8, Dtype::kUint8, 0),
          Rooted(InPlace(OpKind::kReduce, data, 8, Dtype::kUint8), 0),
          Rooted(Between(OpKind::kGather, data, data + 2048, 8, Dtype::kUint8), 0),
          Rooted(Between(OpKind::kScatter, data + 2048, data, 8, Dtype::kUint8), 0),
          Between(OpKind::kAllToAll, data, data + 2048, 8, Dtype::kUint8),
          Between(OpKind::kAllGather, data, data + 2048, 0, Dtype::kUint8)};
      operations.back().counts.assign(world_size, 8);
      for (const Operation& operation : operations) {
        const Status status = communicator.Run(operation, kTimeout, nullptr);
        CHECK(status.code() == StatusCode::kMismatch);
        CHECK_CONTAINS(status.ToString(), "rank 1 said join");
        CHECK_CONTAINS(status.ToString(), std::string(NameOf(operation.kind)) + " of ");
      }
      float one = 1;
      CHECK_OK(communicator.Run(AllReduceOf(&one, 1), kTimeout, nullptr));
      CHECK_EQ(one, static_cast<float>(world_size - 1));
    }
    static_cast<void>(Join(communicator));
  });
}

TEST(DisagreementOfRanksThatHaveNotJoinedIsAMismatch) {
  OnTopologiesOfSeveral([](Communicator& communicator, int rank) {
    const int world_size = communicator.world_size();
    if (world_size == 2) return;
    if (rank != 1) {
      std::vector<float> data(9, 1.0F);
      const Status status = communicator.Run(AllReduceOf(data.data(), rank == 0 ? data.size() : 3),
                                             kTimeout, nullptr);
      CHECK(status.code() == StatusCode::kMismatch);
      CHECK_CONTAINS(status.ToString(),
                     "rank 0 said allreduce of 9 float32 by sum; rank 1 said join");
      CHECK_EQ(data[0], 1.0F);
    }
    CHECK_EQ(Join(communicator), world_size - 1);
  });
}

TEST(LastJoinedRankIsTheHighestOfThoseThatJoinedTogether) {
  OnTopologiesOfSeveral([](Communicator& communicator, int rank) {
    const int world_size = communicator.world_size();
    CHECK_EQ(Join(communicator), world_size - 1);
    for (int last = 0; last < world_size; ++last) {
      if (rank == last) CHECK_OK(communicator.Run(BarrierRequest(), kTimeout, nullptr));
      CHECK_EQ(Join(communicator), last);
    }
  });
}

TEST(JoinRunsAfterQueuedOperations) {
  OnTopologiesOfSeveral([](Communicator& communicator, int rank) {
    std::vector<std::vector<float>> data(4, std::vector<float>(5000, 1.0F));
    std::vector<std::shared_ptr<PendingOperation>> pending;
    const size_t num_batches = rank == 0 ? 2 : 4;
    for (size_t i = 0; i < num_batches; ++i) {
      pending.push_back(communicator.Submit(AllReduceOf(data[i].data(), 5000), kTimeout));
    }
    CHECK_EQ(Join(communicator), communicator.world_size() - 1);
    for (size_t i = 0; i < num_batches; ++i) {
      CHECK_OK(Communicator::Wait(*pending[i], kTimeout, nullptr));
      const int num_taking_part = communicator.world_size() - (i < 2 ? 0 : 1);
      CHECK_EQ(data[i].back(), static_cast<float>(num_taking_part));
    }
  });
}

TEST(WorldOfOneJoinsAtOnce) {
  World world({0});
  CHECK_EQ(Join(world.Open(0)), 0);
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
