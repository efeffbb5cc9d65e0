// Errors as values: a Status says what failed and why, a Result holds a value or a Status.
#ifndef SPARKDL_STATUS_H_
#define SPARKDL_STATUS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace sparkdl {

// The values are sent on the lifelines: append only.
enum class StatusCode : uint8_t {
  kOk = 0,
  kInvalidArgument = 1,
  kFailed = 2,
  kTimeout = 3,
  kAborted = 4,
  kRankLost = 5,
  kInterrupted = 6,
  kMismatch = 8,
  // Used only inside the core: the ranks do not agree on the operation. Becomes kMismatch.
  kDisagreement = 9,
};

// The outcome of something that can fail. Copies share one immutable description.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message);

  // A failure of a system call: appends the text of errno_value.
  static Status FromErrno(std::string what, int errno_value);

  bool ok() const { return detail_ == nullptr; }
  StatusCode code() const { return detail_ ? detail_->code : StatusCode::kOk; }

  // A status of the same code that says what was being done when this failure occurred.
  Status Within(std::string what) const;

  // "what: cause: its cause".
  std::string ToString() const;

 private:
  struct Detail {
    StatusCode code;
    std::string message;
    std::shared_ptr<const Detail> cause;
  };
  std::shared_ptr<const Detail> detail_;
};

// A value, or the status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  // Only if ok().
  T& value() & { return *value_; }               // NOLINT(bugprone-unchecked-optional-access)
  const T& value() const& { return *value_; }    // NOLINT(bugprone-unchecked-optional-access)
  T&& value() && { return *std::move(value_); }  // NOLINT(bugprone-unchecked-optional-access)

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace sparkdl

#define SPARKDL_RETURN_IF_ERROR(expression)      \
  do {                                           \
    ::sparkdl::Status status_of_ = (expression); \
    if (!status_of_.ok()) return status_of_;     \
  } while (false)

#endif  // SPARKDL_STATUS_H_
