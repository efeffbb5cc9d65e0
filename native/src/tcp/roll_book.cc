#include "sparkdl/tcp/roll_book.h"

namespace sparkdl {

std::string NameRanks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

bool RollBook::NoteCall(uint32_t call) {
  if (call <= last_call_) return false;
  last_call_ = call;
  return true;
}

bool RollBook::NoteAnswer(int rank, uint32_t call, uint64_t num_begun) {
  Entry& entry = entries_[static_cast<size_t>(rank)];
  if (call <= entry.call) return false;
  entry = {.call = call, .num_begun = num_begun};
  return true;
}

Attendance RollBook::Of(uint64_t sequence, uint32_t call) const {
  Attendance attendance;
  for (size_t rank = 0; rank < entries_.size(); ++rank) {
    if (entries_[rank].call < call) {
      attendance.silent.push_back(static_cast<int>(rank));
    } else if (entries_[rank].num_begun <= sequence) {
      attendance.absent.push_back(static_cast<int>(rank));
    }
  }
  return attendance;
}

std::string Attendance::ToString() const {
  std::string text;
  if (!absent.empty()) text = NameRanks(absent) + " had not joined";
  if (!silent.empty()) {
    if (!text.empty()) text += ", and ";
    text += NameRanks(silent) + (silent.size() == 1 ? " does" : " do") +
            " not answer: frozen, or cut off from the network";
  }
  if (text.empty()) text = "all ranks had joined, but had not come to its end";
  return text;
}

}  // namespace sparkdl
