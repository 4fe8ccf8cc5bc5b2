// Bounds-checked reading and writing of little-endian fields: the one way in which bytes from a
// device or a socket are parsed. A cursor that ran over its end stays failed (`ok()` is false),
// gives zeros and touches nothing more, so that a decoder checks once, at its end.
// Not thread-safe; never allocates; spans given out point into the caller's memory.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "base/ids.h"

namespace ffs {

static_assert(std::endian::native == std::endian::little,
              "on-disk and on-wire integers are copied as they are");

class Reader {
 public:
  Reader(const void* bytes, size_t size) : at_(static_cast<const uint8_t*>(bytes)), left_(size) {}
  explicit Reader(std::span<const uint8_t> bytes) : Reader(bytes.data(), bytes.size()) {}

  bool ok() const { return ok_; }
  size_t left() const { return left_; }
  bool done() const { return ok_ && left_ == 0; }  // everything was consumed, nothing was missing
  void fail() { ok_ = false, left_ = 0; }

  // The next `size` bytes, or an empty span (and failure) if there are fewer.
  std::span<const uint8_t> bytes(size_t size) {
    if (!ok_ || size > left_) {
      fail();
      return {};
    }
    std::span<const uint8_t> result(at_, size);
    at_ += size;
    left_ -= size;
    return result;
  }
  void skip(size_t size) { (void)bytes(size); }

  template <typename T>
  T value() {  // T: integer, enum or other trivially copyable type without padding
    static_assert(std::is_trivially_copyable_v<T>);
    T result{};
    auto from = bytes(sizeof(T));
    if (ok_) std::memcpy(&result, from.data(), sizeof(T));
    return result;
  }
  uint8_t u8() { return value<uint8_t>(); }
  uint16_t u16() { return value<uint16_t>(); }
  uint32_t u32() { return value<uint32_t>(); }
  uint64_t u64() { return value<uint64_t>(); }
  ChunkKey key() { return value<ChunkKey>(); }
  Version version() { return value<Version>(); }

 private:
  const uint8_t* at_;
  size_t left_;
  bool ok_ = true;
};

class Writer {
 public:
  Writer(void* bytes, size_t size) : start_(static_cast<uint8_t*>(bytes)), size_(size) {}
  explicit Writer(std::span<uint8_t> bytes) : Writer(bytes.data(), bytes.size()) {}

  bool ok() const { return ok_; }
  size_t size() const { return used_; }
  size_t left() const { return size_ - used_; }
  uint8_t* start() const { return start_; }
  std::span<const uint8_t> written() const { return {start_, used_}; }

  // Room for `size` bytes, to be filled by the caller; null (and failure) if it does not fit.
  uint8_t* room(size_t size) {
    if (!ok_ || size > left()) {
      ok_ = false;
      return nullptr;
    }
    uint8_t* result = start_ + used_;
    used_ += size;
    return result;
  }
  void bytes(const void* from, size_t size) {
    uint8_t* to = room(size);
    if (to != nullptr && size != 0) std::memcpy(to, from, size);
  }
  void zeros(size_t size) {
    uint8_t* to = room(size);
    if (to != nullptr && size != 0) std::memset(to, 0, size);
  }
  template <typename T>
  void value(const T& v) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes(&v, sizeof(T));
  }
  void u8(uint8_t v) { value(v); }
  void u16(uint16_t v) { value(v); }
  void u32(uint32_t v) { value(v); }
  void u64(uint64_t v) { value(v); }
  void key(const ChunkKey& v) { value(v); }
  void version(const Version& v) { value(v); }

  // Overwrites an earlier field (a length known only afterwards); `at` + sizeof(T) <= size().
  template <typename T>
  void patch(size_t at, const T& v) {
    if (!ok_ || at + sizeof(T) > used_) {
      ok_ = false;
      return;
    }
    std::memcpy(start_ + at, &v, sizeof(T));
  }

 private:
  uint8_t* start_;
  size_t size_;
  size_t used_ = 0;
  bool ok_ = true;
};

}  // namespace ffs
