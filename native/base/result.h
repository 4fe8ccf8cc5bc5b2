// Result<T>: a value or a small error (a positive errno and a static string).
// No exceptions in the data path; see docs/style.md.
#pragma once

#include <cerrno>
#include <cstdint>
#include <optional>
#include <utility>
#include <variant>

#include "base/check.h"

namespace ffs {

// A positive errno number plus an optional static explanation (never owned, may be null).
struct [[nodiscard]] Error {
  int code = 0;
  const char* what = nullptr;

  static Error of(int code, const char* what = nullptr) { return Error{code, what}; }
};

struct Unit {};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, error) { FFS_CHECK(error.code > 0); }

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  T& value() {
    FFS_CHECK(ok());
    return std::get<0>(state_);
  }
  const T& value() const {
    FFS_CHECK(ok());
    return std::get<0>(state_);
  }
  T& operator*() { return value(); }
  const T& operator*() const { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  Error error() const {
    FFS_CHECK(!ok());
    return std::get<1>(state_);
  }

 private:
  std::variant<T, Error> state_;
};

using Status = Result<Unit>;
inline Status ok_status() {
  return Status(Unit{});
}

}  // namespace ffs

#define FFS_CONCAT_INNER(a, b) a##b
#define FFS_CONCAT(a, b) FFS_CONCAT_INNER(a, b)

// FFS_TRY(auto x, expression): x is the value, or the enclosing function returns the error.
#define FFS_TRY(declaration, expression)          \
  auto FFS_CONCAT(try_, __LINE__) = (expression); \
  if (!FFS_CONCAT(try_, __LINE__).ok()) {         \
    return FFS_CONCAT(try_, __LINE__).error();    \
  }                                               \
  declaration = std::move(FFS_CONCAT(try_, __LINE__).value())

// FFS_TRY_STATUS(expression): returns the error, or goes on.
#define FFS_TRY_STATUS(expression)                   \
  do {                                               \
    auto try_status = (expression);                  \
    if (!try_status.ok()) return try_status.error(); \
  } while (0)
