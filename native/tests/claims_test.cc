// What a mismatch says about each rank: every property that differs, and which ranks said the same.
#include <string>
#include <vector>

#include "check.h"
#include "disagreement.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

TEST(RanksThatSaidTheSameAreNamedTogether) {
  World world({0, 1, 1, 2, 0, 1});
  world.OpenAll();
  CHECK_EQ(Disagree(
               world, 2, [](Saying& saying) { return saying.Of(OpKind::kBroadcast, 5); },
               [](Saying& saying) { return Rooted(saying.Of(OpKind::kBroadcast, 5), 3); }),
           "the ranks disagree about operation 0: ranks 0, 1, 3, 4, 5 said broadcast of 5 float32 "
           "from rank 0; rank 2 said broadcast of 5 float32 from rank 3");
}

TEST(EveryPropertyThatDiffersIsNamed) {
  const Say usual = [](Saying& saying) { return saying.Of(OpKind::kAllReduce, 60); };
  struct Case {
    Say other;
    std::string says;
  };
  const std::vector<Case> cases = {
      {[](Saying& saying) { return saying.Of(OpKind::kAllReduce, 60, Dtype::kInt32); },
       "allreduce of 60 int32 by sum"},
      {[](Saying& saying) { return By(saying.Of(OpKind::kAllReduce, 60), ReduceOp::kMax); },
       "allreduce of 60 float32 by max"},
      {[](Saying& saying) {
         Operation operation = saying.Of(OpKind::kAllReduce, 60);
         operation.prescale = 0.25;
         return operation;
       },
       "allreduce of 60 float32 by sum, prescale 0.25"},
      {[](Saying& saying) {
         Operation operation = saying.Of(OpKind::kAllReduce, 60);
         operation.postscale = 3;
         return operation;
       },
       "allreduce of 60 float32 by sum, postscale 3"},
      {[](Saying& saying) {
         Operation operation = saying.Of(OpKind::kAllReduce, 60);
         operation.name = "weights";
         return operation;
       },
       "allreduce 'weights' of 60 float32 by sum"},
      {[](Saying& saying) {
         Operation operation = saying.Of(OpKind::kAllReduce, 60);
         operation.group = {{saying.output(), 80}, {saying.output() + 80, 160}};
         return operation;
       },
       "allreduce of 60 float32 in arrays of 20, 40 by sum"},
      {[](Saying& saying) {
         Operation operation = saying.Of(OpKind::kAllReduce, 60);
         operation.group = {{nullptr, 0}, {saying.output(), 240}};
         return operation;
       },
       "allreduce of 60 float32 in arrays of 0, 60 by sum"},
      {[](Saying& saying) { return saying.Of(OpKind::kReduce, 60); },
       "reduce of 60 float32 by sum to rank 0"},
      {[](Saying& saying) { return saying.Of(OpKind::kReduceScatter, 60); },
       "reduce_scatter of 60 float32 by sum"},
      {[](Saying& saying) { return saying.Of(OpKind::kAllGather, 40'000); },
       "allgather of 40000 float32"},
      {[](Saying& saying) { return saying.Of(OpKind::kGather, 40'000); },
       "gather of 40000 float32 to rank 0"},
      {[](Saying& saying) { return saying.Of(OpKind::kScatter, 40'000); },
       "scatter of 40000 float32 from rank 0"},
      {[](Saying& saying) { return saying.Of(OpKind::kAllToAll, 60); }, "alltoall of 60 float32"},
      {[](Saying&) { return BarrierRequest(); }, "barrier"},
  };
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 0, 0}, std::vector{0, 1, 2},
                            std::vector{0, 1, 1, 0, 1}}) {
    World world(hosts);
    world.OpenAll();
    for (const Case& one : cases) {
      const std::string text = Disagree(world, 1, usual, one.other);
      CHECK_CONTAINS(text, " said allreduce of 60 float32 by sum");
      CHECK_CONTAINS(text, "rank 1 said " + one.says);
    }
  }
}

TEST(BlocksThatDifferAreNamed) {
  for (const OpKind kind :
       {OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kGather, OpKind::kScatter}) {
    World world({0, 0, 1});
    world.OpenAll();
    const auto with_counts = [&](const Counts& counts) {
      return [kind, counts](Saying& saying) {
        Operation operation = saying.Of(kind, 9);
        operation.counts = counts;
        return operation;
      };
    };
    const std::string text = Disagree(world, 2, with_counts({2, 3, 4}), with_counts({2, 4, 3}));
    CHECK_CONTAINS(text, "float32 in blocks of 2, 3, 4");
    CHECK_CONTAINS(text,
                   "rank 2 said " + std::string(NameOf(kind)) + " of float32 in blocks of 2, 4, 3");
  }
}

TEST(BlocksOfGroupsThatDifferAreNamed) {
  World world({0, 0, 1});
  world.OpenAll();
  // Ten elements for each rank, divided among the arrays in different ways.
  const auto in_arrays_of = [&](size_t first) {
    return [first](Saying& saying) {
      const size_t second = 10 - first;
      Operation operation = saying.Of(OpKind::kReduceScatter, 10);
      operation.group = {{saying.output(), 4 * first}, {saying.output() + 4 * first, 4 * second}};
      operation.group_input = {{saying.output(), 12 * first},
                               {saying.output() + 12 * first, 12 * second}};
      operation.group_counts = {first, first, first, second, second, second};
      return operation;
    };
  };
  const std::string text = Disagree(world, 2, in_arrays_of(4), in_arrays_of(7));
  CHECK_CONTAINS(text, "reduce_scatter of 10 float32 in arrays of blocks (4, 4, 4), (6, 6, 6) by");
  CHECK_CONTAINS(text,
                 "rank 2 said reduce_scatter of 10 float32 in arrays of blocks (7, 7, 7), (3");
}

// The text of the exchanged claims is truncated; differences beyond its end are distinguished
// nevertheless.
TEST(DifferencesBeyondTheTextAreDistinguished) {
  World world({0, 0, 1});
  world.OpenAll();
  const auto named = [](const std::string& name) {
    return [name](Saying& saying) {
      Operation operation = saying.Of(OpKind::kAllReduce, 5);
      operation.name = name;
      return operation;
    };
  };
  const std::string text =
      Disagree(world, 1, named(std::string(600, 'x')), named(std::string(600, 'x') + "y"));
  CHECK_CONTAINS(text, "ranks 0, 2 said allreduce 'xxx");
  CHECK_CONTAINS(text, "; rank 1 said allreduce 'xxx");
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
