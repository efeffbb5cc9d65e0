// A few macros for tests: one executable per subject, one claim per TEST.
#ifndef SPARKDL_TESTS_CHECK_H_
#define SPARKDL_TESTS_CHECK_H_

#include <atomic>
#include <cstdio>
#include <mutex>
#include <sstream>
#include <string>

namespace sparkdl::tests {

// One test, linked to the one registered before, because registration before main() must not
// allocate.
struct Test {
  Test(const char* its_name, void (*its_run)()) noexcept
      : name(its_name), run(its_run), previous(Latest()) {
    Latest() = this;
  }
  static Test*& Latest() noexcept {
    static Test* latest = nullptr;
    return latest;
  }

  const char* name;
  void (*run)();
  Test* previous;
};

inline std::atomic<int>& NumFailures() {
  static std::atomic<int> failures{0};
  return failures;
}

inline void ReportFailure(const char* file, int line, const std::string& text) {
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  // A broken collective fails for every element; the first few failures say enough.
  if (NumFailures().fetch_add(1) < 20) std::printf("%s:%d: %s\n", file, line, text.c_str());
}

inline int RunAllTests() {
  for (const Test* test = Test::Latest(); test != nullptr; test = test->previous) {
    const int before = NumFailures();
    test->run();
    std::printf("%s %s\n", NumFailures() == before ? "ok    " : "FAILED", test->name);
    std::fflush(stdout);
  }
  return NumFailures() == 0 ? 0 : 1;
}

template <typename A, typename B>
void CheckEqual(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " is not " << b;
  ReportFailure(file, line, out.str());
}

inline void CheckContains(const std::string& text, const std::string& part, const char* file,
                          int line) {
  if (text.find(part) != std::string::npos) return;
  ReportFailure(file, line, "\"" + text + "\" does not contain \"" + part + "\"");
}

}  // namespace sparkdl::tests

// NOLINTBEGIN(bugprone-macro-parentheses): a declared name takes none
#define TEST(name)                                                 \
  static void name();                                              \
  static ::sparkdl::tests::Test registration_##name(#name, &name); \
  static void name()
// NOLINTEND(bugprone-macro-parentheses)

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (!(condition)) ::sparkdl::tests::ReportFailure(__FILE__, __LINE__, #condition); \
  } while (false)
#define CHECK_EQ(a, b) ::sparkdl::tests::CheckEqual((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_OK(status) CHECK_EQ((status).ToString(), "")
#define CHECK_CONTAINS(text, part) \
  ::sparkdl::tests::CheckContains((text), (part), __FILE__, __LINE__)

#define TEST_MAIN() \
  int main() { return ::sparkdl::tests::RunAllTests(); }

#endif  // SPARKDL_TESTS_CHECK_H_
