// How the floating-point unit rounds, and what it does with subnormal numbers.
#ifndef SPARKDL_FLOAT_ENVIRONMENT_H_
#define SPARKDL_FLOAT_ENVIRONMENT_H_

#if defined(__SSE__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace sparkdl {

// As IEEE 754 has it by default, as long as this lives; then again as the thread had it. An
// operation runs on a thread of the caller's or on the progress thread, and one of these may flush
// subnormal numbers to zero: ranks would come to different results.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

#if defined(__SSE__)
  // The general functions take longer than a small operation may.
  DefaultFloatEnvironment() : found_(_mm_getcsr()) {
    if (differs()) _mm_setcsr(kDefault);
  }
  ~DefaultFloatEnvironment() {
    if (differs()) _mm_setcsr(found_);
  }

 private:
  static constexpr unsigned kDefault = 0x1f80;
  static constexpr unsigned kExceptions = 0x3f;  // that have occurred

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
