// A communicator of the stand-in for NCCL: ranks of one machine that exchange files in a directory.
#ifndef SPARKDL_TESTS_STAND_IN_COMM_H_
#define SPARKDL_TESTS_STAND_IN_COMM_H_

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace stand_in {

enum Result {
  kSuccess,
  kUnhandledCuda,
  kSystem,
  kInternal,
  kInvalidArgument,
  kInvalidUsage,
  kRemote,
  kInProgress
};

// Never freed, so that using one after its end gives an error.
struct Comm {
  std::filesystem::path folder;
  int rank = 0;
  int num_ranks = 1;
  int device = 0;
  bool blocking = false;
  std::atomic<bool> aborted{false};
  std::atomic<bool> over{false};
  std::atomic<int> state{kSuccess};
  std::atomic<int> num_running{0};
  int num_splits = 0;
  long num_collectives = 0;
  std::vector<long> num_sent;
  std::vector<long> num_received;

  void PutFile(const std::string& name, const std::string& content) const {
    const auto unfinished = folder / (name + ".unfinished");
    std::ofstream(unfinished, std::ios::binary) << content;
    std::filesystem::rename(unfinished, folder / name);
  }

  // Returns nothing if the communicator is aborted while it waits.
  std::optional<std::string> AwaitFile(const std::string& name) const {
    while (!std::filesystem::exists(folder / name)) {
      if (aborted) return std::nullopt;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    std::ifstream file(folder / name, std::ios::binary);
    std::stringstream content;
    content << file.rdbuf();
    return content.str();
  }

  // Waits until the file is taken, or the communicator is aborted.
  void AwaitTaken(const std::string& name) const {
    while (std::filesystem::exists(folder / name) && !aborted) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  // Returns every rank's value in rank order.
  std::optional<std::vector<std::string>> Exchange(const std::string& name,
                                                   const std::string& own) const {
    PutFile(name + "." + std::to_string(rank), own);
    std::vector<std::string> values;
    for (int other = 0; other < num_ranks; ++other) {
      const auto value = AwaitFile(name + "." + std::to_string(other));
      if (!value.has_value()) return std::nullopt;
      values.push_back(*value);
    }
    return values;
  }

  void AwaitAbort() const {
    while (!aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

}  // namespace stand_in

#endif  // SPARKDL_TESTS_STAND_IN_COMM_H_
