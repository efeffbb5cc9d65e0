// Who answered when the ranks were last asked how far they have come.
#ifndef SPARKDL_TCP_ROLL_BOOK_H_
#define SPARKDL_TCP_ROLL_BOOK_H_

#include <cstdint>
#include <string>
#include <vector>

namespace sparkdl {

// "rank 3", "ranks 1, 3".
std::string NameRanks(const std::vector<int>& ranks);

// What a roll call found out about one operation.
struct Attendance {
  std::vector<int> absent;  // answered, and have not begun it
  std::vector<int> silent;  // did not answer

  // "rank 1 had not joined".
  std::string ToString() const;
};

// Roll calls are numbered. Whoever calls takes the next number after the last that it heard of, so
// calls that are made at the same time are one. Not thread-safe.
class RollBook {
 public:
  explicit RollBook(int world_size) : entries_(static_cast<size_t>(world_size)) {}

  uint32_t last_call() const { return last_call_; }
  // False if the call was heard before.
  bool NoteCall(uint32_t call);
  // The rank says that it has begun the first num_begun operations. False if that is no news.
  bool NoteAnswer(int rank, uint32_t call, uint64_t num_begun);

  // How the operation stands after the answers to this call and later ones.
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
