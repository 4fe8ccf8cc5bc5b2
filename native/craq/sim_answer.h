// The simulator's answers: records appended to one growing buffer (sim.h lists them).
#pragma once

#include <cstring>

#include "craq/sim_store.h"

namespace ffs::craq::sim {

enum class AnswerType : uint8_t {
  send = 1,
  reply,
  record,
  started,
  state,
  proposal,
  fault,
  dumped,
  failed,
  repaired,
  status,
  compared,
  eviction,
  evicted,
  sampled,
};

class Answer {
 public:
  Answer(Bytes& out, AnswerType type) : out_(out) {
    put(static_cast<uint8_t>(type));
    start_ = out_.size();
    put(uint32_t{0});
  }
  ~Answer() { patch(start_, static_cast<uint32_t>(out_.size() - start_ - 4)); }
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

  template <typename T>
  void put(const T& v) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* from = reinterpret_cast<const uint8_t*>(&v);
    out_.insert(out_.end(), from, from + sizeof(T));
  }
  void put_flag(bool v) { put(static_cast<uint8_t>(v)); }
  void put_raw(const void* from, size_t size) {
    const auto* at = static_cast<const uint8_t*>(from);
    out_.insert(out_.end(), at, at + size);
  }
  void put_bytes(const void* from, size_t size) {
    put(static_cast<uint32_t>(size));
    put_raw(from, size);
  }
  void put_bytes(const Bytes& b) { put_bytes(b.data(), b.size()); }
  void put_identity(const UpdateIdentity& who) {
    put(who.client.value);
    put(who.channel);
    put(who.sequence);
  }
  size_t mark() const { return out_.size(); }
  void patch(size_t at, uint32_t v) { std::memcpy(out_.data() + at, &v, 4); }

 private:
  Bytes& out_;
  size_t start_ = 0;
};

}  // namespace ffs::craq::sim
