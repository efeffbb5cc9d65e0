// Which ranks answered a roll call, and how many operations they had begun.
#include "sparkdl/tcp/roll_book.h"

#include "check.h"

namespace sparkdl::tests {
namespace {

TEST(AbsentAndSilentRanksAreDistinguished) {
  RollBook book(4);
  CHECK(book.NoteCall(1));
  CHECK(book.NoteAnswer(0, 1, 8));
  CHECK(book.NoteAnswer(2, 1, 7));
  // Operation 7 is the eighth.
  const Attendance attendance = book.Of(7, 1);
  CHECK_EQ(NameRanks(attendance.absent), "rank 2");
  CHECK_EQ(NameRanks(attendance.silent), "ranks 1, 3");
  CHECK_EQ(attendance.ToString(),
           "rank 2 had not joined, and ranks 1, 3 do not answer: frozen, or cut off from the "
           "network");
  CHECK(book.Of(6, 1).absent.empty());
}

TEST(EveryCallAndAnswerIsNewOnce) {
  RollBook book(2);
  CHECK(book.NoteCall(3));
  CHECK(!book.NoteCall(3) && !book.NoteCall(2));
  CHECK_EQ(book.last_call(), 3U);
  CHECK(book.NoteAnswer(1, 3, 5));
  CHECK(!book.NoteAnswer(1, 3, 6) && !book.NoteAnswer(1, 2, 9));
  CHECK(book.NoteAnswer(1, 4, 6));
  CHECK_EQ(NameRanks(book.Of(5, 4).silent), "rank 0");
}

TEST(AnswersToLaterCallsCountForEarlierOnes) {
  RollBook book(2);
  CHECK(book.NoteAnswer(0, 2, 1));
  CHECK(book.NoteAnswer(1, 2, 1));
  CHECK_EQ(book.Of(0, 1).ToString(), "all ranks had joined, but had not come to its end");
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
