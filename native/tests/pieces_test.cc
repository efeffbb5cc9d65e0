// Streams in pieces, and the division into even parts.
#include "sparkdl/pieces.h"

#include <array>

#include "check.h"

namespace sparkdl::tests {
namespace {

TEST(CursorCrossesPiecesAndSkipsEmptyOnes) {
  std::array<std::byte, 10> memory{};
  const Pieces pieces = {
      {memory.data(), 0}, {memory.data(), 3}, {nullptr, 0}, {memory.data() + 5, 4}};
  PieceCursor<std::byte> cursor(pieces);
  CHECK_EQ(cursor.remaining(), 7U);
  CHECK_EQ(cursor.Peek(100).bytes, 3U);
  cursor.Advance(2);
  CHECK(cursor.Peek(100).data == memory.data() + 2);
  cursor.Advance(2);
  CHECK(cursor.Peek(100).data == memory.data() + 6);
  CHECK_EQ(cursor.Peek(2).bytes, 2U);
  cursor.Advance(3);
  CHECK_EQ(cursor.remaining(), 0U);
  CHECK_EQ(cursor.Peek(1).bytes, 0U);
}

TEST(PartsCoverTheWholeWithoutOverlap) {
  for (const size_t total : {0, 1, 15, 16, 17, 1000}) {
    for (const size_t parts : {1, 2, 3, 7}) {
      for (const size_t unit : {1, 16}) {
        size_t next = 0;
        for (size_t i = 0; i < parts; ++i) {
          const Part part = PartOf(total, parts, i, unit);
          CHECK_EQ(part.begin, next);
          CHECK(part.begin % unit == 0 || part.size == 0);
          next += part.size;
        }
        CHECK_EQ(next, total);
      }
    }
  }
}

TEST(PartsOfMoreThanFourGibibytesKeepTheirSize) {
  const size_t total = (size_t{5} << 30) + 3;
  const Part last = PartOf(total, 2, 1, 64);
  CHECK_EQ(last.begin + last.size, total);
  CHECK(last.begin > (size_t{2} << 30));
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
