// Calls and answers of the roll calls, in which ranks are asked how many operations they have
// begun.
#ifndef SPARKDL_TCP_ROLL_BOOK_H_
#define SPARKDL_TCP_ROLL_BOOK_H_

#include <cstdint>
#include <string>
#include <vector>

namespace sparkdl {

// Such as "rank 3" or "ranks 1, 3".
std::string NameRanks(const std::vector<int>& ranks);

// Result of a roll call for one operation.
struct Attendance {
  std::vector<int> absent;  // ranks that answered and have not begun it
  std::vector<int> silent;  // ranks that did not answer

  // Such as "rank 1 had not joined".
  std::string ToString() const;
};

// Roll calls are numbered. The number of a new call is that of the latest known call plus one, so
// simultaneous calls of several ranks are the same call. Not thread-safe.
class RollBook {
 public:
  explicit RollBook(int world_size) : entries_(static_cast<size_t>(world_size)) {}

  uint32_t last_call() const { return last_call_; }
  // Returns false if the call is already known.
  bool NoteCall(uint32_t call);
  // Notes that a rank has begun the first num_begun operations. Returns false if the answer is
  // already known.
  bool NoteAnswer(int rank, uint32_t call, uint64_t num_begun);

  // State of an operation according to the answers to this call and to later ones.
  Attendance Of(uint64_t sequence, uint32_t call) const;

  bool IsRank(int rank) const { return rank >= 0 && static_cast<size_t>(rank) < entries_.size(); }

 private:
  struct Entry {
    uint32_t call = 0;
    uint64_t num_begun = 0;
  };

  uint32_t last_call_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace sparkdl

#endif  // SPARKDL_TCP_ROLL_BOOK_H_
