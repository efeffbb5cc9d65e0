#include "sparkdl/status.h"

#include <system_error>

namespace sparkdl {

Status::Status(StatusCode code, std::string message)
    : detail_(std::make_shared<const Detail>(Detail{code, std::move(message), nullptr})) {}

Status Status::FromErrno(std::string what, int errno_value) {
  return Status(StatusCode::kFailed,
                std::move(what) + ": " + std::generic_category().message(errno_value));
}

Status Status::Within(std::string what) const {
  if (ok()) return *this;
  Status outer;
  outer.detail_ = std::make_shared<const Detail>(Detail{detail_->code, std::move(what), detail_});
  return outer;
}

std::string Status::ToString() const {
  std::string text;
  for (const Detail* detail = detail_.get(); detail != nullptr; detail = detail->cause.get()) {
    if (!text.empty()) text += ": ";
    text += detail->message;
  }
  return text;
}

}  // namespace sparkdl
