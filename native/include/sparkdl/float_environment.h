// Rounding mode of the floating-point unit, and its treatment of subnormal numbers.
#ifndef SPARKDL_FLOAT_ENVIRONMENT_H_
#define SPARKDL_FLOAT_ENVIRONMENT_H_

#if defined(__SSE__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace sparkdl {

// Sets the floating-point environment of the thread to the default of IEEE 754 as long as the
// object lives, then restores the previous one. An operation runs on a thread of the caller or on
// the progress thread. If one of them flushed subnormal numbers to zero, the results of the ranks
// would differ.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

#if defined(__SSE__)
  // The functions of <cfenv> would take too long for a small operation.
  DefaultFloatEnvironment() : found_(_mm_getcsr()) {
    if (differs()) _mm_setcsr(kDefault);
  }
  ~DefaultFloatEnvironment() {
    if (differs()) _mm_setcsr(found_);
  }

 private:
  static constexpr unsigned kDefault = 0x1f80;
  static constexpr unsigned kExceptions = 0x3f;  // flags of exceptions that have occurred

  bool differs() const { return (found_ & ~kExceptions) != kDefault; }

  const unsigned found_;
#else
  DefaultFloatEnvironment() {
    std::fegetenv(&found_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&found_); }

 private:
  std::fenv_t found_;
#endif
};

}  // namespace sparkdl

#endif  // SPARKDL_FLOAT_ENVIRONMENT_H_
