// Ranks that are not about to do the same, and what they are told.
#ifndef SPARKDL_TESTS_DISAGREEMENT_H_
#define SPARKDL_TESTS_DISAGREEMENT_H_

#include <cstddef>
#include <functional>
#include <string>

#include "requests.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {

// What one rank says, with room for whatever it may ask for.
class Saying {
 public:
  Saying();

  Operation Of(OpKind kind, size_t count, Dtype dtype = Dtype::kFloat32);
  std::byte* output() { return output_.data(); }
  // Whether nothing was written, neither to what operations read nor to what they write.
  bool is_untouched() const;

 private:
  Bytes input_;
  Bytes output_;
};

using Say = std::function<Operation(Saying&)>;

// All ranks of the world, which are open, say something. Checks that all of them get the same text
// of a mismatch, that nothing is written and that the next operations are right; returns the text.
std::string Disagree(World& world, const std::function<Operation(Saying&, int rank)>& say);

// The same, where one rank says another thing than all others.
std::string Disagree(World& world, int odd, const Say& usual, const Say& other);

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_DISAGREEMENT_H_
