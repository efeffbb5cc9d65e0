// Ranks that call different operations, and the error that they get.
#ifndef SPARKDL_TESTS_DISAGREEMENT_H_
#define SPARKDL_TESTS_DISAGREEMENT_H_

#include <cstddef>
#include <functional>
#include <string>

#include "requests.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {

// Makes the operation that one rank calls, with buffers large enough for any of them.
class Saying {
 public:
  Saying();

  Operation Of(OpKind kind, size_t count, Dtype dtype = Dtype::kFloat32);
  std::byte* output() { return output_.data(); }
  // Whether nothing was written, neither to the input buffer nor to the output buffer.
  bool is_untouched() const;

 private:
  Bytes input_;
  Bytes output_;
};

using Say = std::function<Operation(Saying&)>;

// Makes all ranks of the world, which must be open, call an operation each. Checks that all of them
// get the same text of a mismatch, that nothing is written, and that the next operations are right;
// returns the text.
std::string Disagree(World& world, const std::function<Operation(Saying&, int rank)>& say);

// The same, but the rank `odd` calls another operation than all others.
std::string Disagree(World& world, int odd, const Say& usual, const Say& other);

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_DISAGREEMENT_H_
