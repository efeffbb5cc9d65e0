#include "trial.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "check.h"
#include "sparkdl/collectives/blocks.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

// Fills memory that has not been written to.
constexpr std::byte kUntouched{0x5a};

// Bytes between the arrays of a group, so that they lie at odd addresses.
constexpr size_t kGap = 3;

void CheckBytes(const Bytes& got, const Bytes& expected, const std::string& what) {
  if (AreSame(got, expected)) return;
  const auto differs = std::ranges::mismatch(expected, got);
  ReportFailure(__FILE__, __LINE__,
                what + " differs at byte " + std::to_string(differs.in1 - expected.begin()));
}

void Append(Bytes& bytes, const Bytes& more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

// An in-place operation.
Trial InOne(Operation operation, Bytes before, Bytes afterwards) {
  Trial trial;
  trial.output = std::move(before);
  trial.output_afterwards = std::move(afterwards);
  operation.input = trial.output.data();
  operation.output = trial.output.data();
  trial.operation = std::move(operation);
  return trial;
}

// An operation from one buffer to another, which is untouched before.
Trial FromTo(Operation operation, Bytes input, Bytes afterwards) {
  Trial trial;
  trial.output = Bytes(afterwards.size(), kUntouched);
  trial.output_afterwards = std::move(afterwards);
  trial.input_afterwards = input;
  trial.input = std::move(input);
  operation.input = trial.input.data();
  operation.output = trial.output.data();
  trial.operation = std::move(operation);
  return trial;
}

Operation ReductionOf(OpKind kind, const Trials::Numbers& numbers, size_t count) {
  Operation operation = By(InPlace(kind, nullptr, count, numbers.dtype), numbers.op);
  operation.prescale = numbers.scales.before;
  operation.postscale = numbers.scales.after;
  return operation;
}

Operation BlocksOf(OpKind kind, Dtype dtype, size_t count, const Counts& counts) {
  Operation operation = InPlace(kind, nullptr, count, dtype);
  operation.counts = counts;
  return operation;
}

}  // namespace

void Trial::Check(const Status& status) const {
  CHECK_OK(status);
  if (!status.ok()) return;
  CheckBytes(output, output_afterwards, Describe(operation));
  CheckBytes(input, input_afterwards, "the input of " + Describe(operation));
}

Trial Trials::AllReduce(const Numbers& numbers, size_t count) const {
  return InOne(ReductionOf(OpKind::kAllReduce, numbers, count),
               Elements(numbers.dtype, rank_, 0, count),
               Reduced(numbers.dtype, numbers.op, world_size_, 0, count, numbers.scales));
}

Trial Trials::AllReduceGroup(const Numbers& numbers, const std::vector<size_t>& counts) const {
  Bytes before;
  Bytes afterwards;
  size_t total = 0;
  for (const size_t count : counts) {
    Append(before, Elements(numbers.dtype, rank_, total, count));
    Append(afterwards,
           Reduced(numbers.dtype, numbers.op, world_size_, total, count, numbers.scales));
    before.resize(before.size() + kGap, kUntouched);
    afterwards.resize(afterwards.size() + kGap, kUntouched);
    total += count;
  }
  Trial trial = InOne(ReductionOf(OpKind::kAllReduce, numbers, total), before, afterwards);
  trial.operation.input = nullptr;
  trial.operation.output = nullptr;
  std::byte* next = trial.output.data();
  for (const size_t count : counts) {
    trial.operation.group.push_back({next, count * BytesOf(numbers.dtype)});
    next += count * BytesOf(numbers.dtype) + kGap;
  }
  return trial;
}

Trial Trials::Reduce(const Numbers& numbers, size_t count, int root) const {
  Bytes before = Elements(numbers.dtype, rank_, 0, count);
  Bytes afterwards = before;
  if (rank_ == root) {
    afterwards = Reduced(numbers.dtype, numbers.op, world_size_, 0, count, numbers.scales);
  }
  return InOne(Rooted(ReductionOf(OpKind::kReduce, numbers, count), root), std::move(before),
               std::move(afterwards));
}

Trial Trials::ReduceScatter(const Numbers& numbers, size_t count, const Counts& counts,
                            Place place) const {
  const size_t size = BytesOf(numbers.dtype);
  const Blocks blocks(counts, count, size, world_size_);
  Operation operation = ReductionOf(OpKind::kReduceScatter, numbers, count);
  operation.counts = counts;
  Bytes whole = Elements(numbers.dtype, rank_, 0, blocks.total() / size);
  const Bytes mine = Reduced(numbers.dtype, numbers.op, world_size_, blocks.begin(rank_) / size,
                             blocks.bytes(rank_) / size, numbers.scales);
  if (place == Place::kApart) return FromTo(std::move(operation), std::move(whole), mine);
  Bytes afterwards = whole;
  std::ranges::copy(mine, afterwards.data() + blocks.begin(rank_));
  Trial trial = InOne(std::move(operation), std::move(whole), std::move(afterwards));
  trial.operation.output += blocks.begin(rank_);
  return trial;
}

Bytes Trials::AllBlocks(Dtype dtype, size_t count, const Counts& counts) const {
  Bytes all;
  for (int rank = 0; rank < world_size_; ++rank) {
    const size_t own = counts.empty() ? count : counts[static_cast<size_t>(rank)];
    Append(all, Elements(dtype, rank, 0, own));
  }
  return all;
}

Trial Trials::AllGather(Dtype dtype, size_t count, const Counts& counts, Place place) const {
  const Blocks blocks(counts, count, BytesOf(dtype), world_size_);
  const Bytes mine = Elements(dtype, rank_, 0, blocks.bytes(rank_) / BytesOf(dtype));
  Operation operation = BlocksOf(OpKind::kAllGather, dtype, count, counts);
  Bytes afterwards = AllBlocks(dtype, count, counts);
  if (place == Place::kApart) return FromTo(std::move(operation), mine, std::move(afterwards));
  Bytes before(afterwards.size(), kUntouched);
  std::ranges::copy(mine, before.data() + blocks.begin(rank_));
  Trial trial = InOne(std::move(operation), std::move(before), std::move(afterwards));
  trial.operation.input += blocks.begin(rank_);
  return trial;
}

// An operation on blocks of several arrays, without memory for them yet.
Operation Trials::GroupOf(Operation operation, const std::vector<Counts>& counts) const {
  Counts sums(static_cast<size_t>(world_size_));
  for (const Counts& of_array : counts) {
    operation.group_counts.insert(operation.group_counts.end(), of_array.begin(), of_array.end());
    std::ranges::transform(sums, of_array, sums.begin(), std::plus());
  }
  operation.count = std::accumulate(sums.begin(), sums.end(), uint64_t{0});
  if (std::ranges::count(sums, sums[0]) == world_size_) {
    operation.count = sums[0];
  } else {
    operation.counts = std::move(sums);
  }
  return operation;
}

Trial Trials::ReduceScatterGroup(const Numbers& numbers, const std::vector<Counts>& counts) const {
  const size_t size = BytesOf(numbers.dtype);
  Bytes input;
  Bytes output;
  size_t first = 0;
  for (const Counts& of_array : counts) {
    const Blocks blocks(of_array, 0, size, world_size_);
    Append(input, Elements(numbers.dtype, rank_, first, blocks.total() / size));
    Append(output,
           Reduced(numbers.dtype, numbers.op, world_size_, first + blocks.begin(rank_) / size,
                   blocks.bytes(rank_) / size, numbers.scales));
    input.resize(input.size() + kGap, kUntouched);
    output.resize(output.size() + kGap, kUntouched);
    first += blocks.total() / size;
  }
  Trial trial = FromTo(GroupOf(ReductionOf(OpKind::kReduceScatter, numbers, 0), counts),
                       std::move(input), std::move(output));
  const std::byte* from = trial.input.data();
  std::byte* to = trial.output.data();
  for (const Counts& of_array : counts) {
    const Blocks blocks(of_array, 0, size, world_size_);
    trial.operation.group_input.push_back({from, blocks.total()});
    trial.operation.group.push_back({to, blocks.bytes(rank_)});
    from += blocks.total() + kGap;
    to += blocks.bytes(rank_) + kGap;
  }
  return trial;
}

Trial Trials::AllGatherGroup(Dtype dtype, const std::vector<Counts>& counts) const {
  const size_t size = BytesOf(dtype);
  Bytes input;
  Bytes output;
  size_t first = 0;  // so that no two arrays begin with the same elements
  for (const Counts& of_array : counts) {
    Append(input, Elements(dtype, rank_, first, of_array[static_cast<size_t>(rank_)]));
    for (int rank = 0; rank < world_size_; ++rank) {
      Append(output, Elements(dtype, rank, first, of_array[static_cast<size_t>(rank)]));
    }
    input.resize(input.size() + kGap, kUntouched);
    output.resize(output.size() + kGap, kUntouched);
    first += 5;
  }
  Trial trial = FromTo(GroupOf(BlocksOf(OpKind::kAllGather, dtype, 0, {}), counts),
                       std::move(input), std::move(output));
  const std::byte* from = trial.input.data();
  std::byte* to = trial.output.data();
  for (const Counts& of_array : counts) {
    const Blocks blocks(of_array, 0, size, world_size_);
    trial.operation.group_input.push_back({from, blocks.bytes(rank_)});
    trial.operation.group.push_back({to, blocks.total()});
    from += blocks.bytes(rank_) + kGap;
    to += blocks.total() + kGap;
  }
  return trial;
}

Trial Trials::Gather(Dtype dtype, size_t count, int root, const Counts& counts) const {
  const Blocks blocks(counts, count, BytesOf(dtype), world_size_);
  return FromTo(Rooted(BlocksOf(OpKind::kGather, dtype, count, counts), root),
                Elements(dtype, rank_, 0, blocks.bytes(rank_) / BytesOf(dtype)),
                rank_ == root ? AllBlocks(dtype, count, counts) : Bytes{});
}

Trial Trials::Scatter(Dtype dtype, size_t count, int root, const Counts& counts) const {
  const Blocks blocks(counts, count, BytesOf(dtype), world_size_);
  return FromTo(Rooted(BlocksOf(OpKind::kScatter, dtype, count, counts), root),
                rank_ == root ? AllBlocks(dtype, count, counts) : Bytes{},
                Elements(dtype, rank_, 0, blocks.bytes(rank_) / BytesOf(dtype)));
}

Trial Trials::Broadcast(Dtype dtype, size_t count, int root) const {
  return InOne(Rooted(InPlace(OpKind::kBroadcast, nullptr, count, dtype), root),
               Elements(dtype, rank_, 0, count), Elements(dtype, root, 0, count));
}

Trial Trials::AllToAllOf(Dtype dtype, const std::function<size_t(int, int)>& count_between) const {
  Bytes sent;
  Bytes received;
  for (int from = 0; from < world_size_; ++from) {
    size_t begin = 0;
    for (int to = 0; to < world_size_; ++to) {
      const size_t count = count_between(from, to);
      if (from == rank_) Append(sent, Elements(dtype, from, begin, count));
      if (to == rank_) Append(received, Elements(dtype, from, begin, count));
      begin += count;
    }
  }
  return FromTo(InPlace(OpKind::kAllToAll, nullptr, 0, dtype), std::move(sent),
                std::move(received));
}

Trial Trials::AllToAll(Dtype dtype, size_t count) const {
  Trial trial = AllToAllOf(dtype, [&](int, int) { return count; });
  trial.operation.count = count;
  return trial;
}

Trial Trials::AllToAll(Dtype dtype, const std::function<size_t(int, int)>& count_between) const {
  Trial trial = AllToAllOf(dtype, count_between);
  for (int other = 0; other < world_size_; ++other) {
    trial.operation.counts.push_back(count_between(rank_, other));
    trial.operation.receive_counts.push_back(count_between(other, rank_));
  }
  return trial;
}

void OnEveryTopology(const std::function<void(Communicator&, const Trials&)>& function) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run(
        [&](Communicator& communicator, int) { function(communicator, Trials(communicator)); });
  }
}

void RunTrial(Communicator& communicator, const Trial& trial) {
  trial.Check(communicator.Run(trial.operation, kTimeout, nullptr));
}

}  // namespace sparkdl::tests
