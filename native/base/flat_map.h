// A hash map in one array (open addressing, linear probing, deletion by shifting back). Values
// move when the map changes. It grows when two thirds full; reserve() at start avoids that.
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"

namespace ffs {

template <typename Key, typename Value, typename Hash>
class FlatMap {
 public:
  explicit FlatMap(size_t capacity = 16) { reserve(capacity); }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  void reserve(size_t capacity) {
    size_t slots = 16;
    while (slots * 2 < capacity * 3) slots *= 2;
    if (slots > slots_.size()) rehash(slots);
  }

  Value* find(const Key& key) {
    for (size_t i = home(key);; i = (i + 1) & mask_) {
      if (!slots_[i].used) return nullptr;
      if (slots_[i].key == key) return &slots_[i].value;
    }
  }
  const Value* find(const Key& key) const { return const_cast<FlatMap*>(this)->find(key); }

  // The value of `key`, made with Value{} if it isn't there.
  Value& operator[](const Key& key) {
    if (Value* found = find(key)) return *found;
    if ((size_ + 1) * 3 > slots_.size() * 2) rehash(slots_.size() * 2);
    size_t i = home(key);
    while (slots_[i].used) i = (i + 1) & mask_;
    slots_[i].used = true;
    slots_[i].key = key;
    slots_[i].value = Value{};
    size_++;
    return slots_[i].value;
  }

  bool erase(const Key& key) {
    size_t i = home(key);
    for (;; i = (i + 1) & mask_) {
      if (!slots_[i].used) return false;
      if (slots_[i].key == key) break;
    }
    remove_at(i);
    return true;
  }

  template <typename F>
  void for_each(F f) const {
    for (const Slot& slot : slots_) {
      if (slot.used) f(slot.key, slot.value);
    }
  }

  // The same with values that f may change.
  template <typename F>
  void update_each(F f) {
    for (Slot& slot : slots_) {
      if (slot.used) f(slot.key, slot.value);
    }
  }

  // Removes all for which f(key, value) is true.
  template <typename F>
  void erase_if(F f) {
    std::vector<Key> doomed;
    for (const Slot& slot : slots_) {
      if (slot.used && f(slot.key, slot.value)) doomed.push_back(slot.key);
    }
    for (const Key& key : doomed) erase(key);
  }

 private:
  struct Slot {
    Key key{};
    Value value{};
    bool used = false;
  };

  size_t home(const Key& key) const { return Hash{}(key)&mask_; }

  void remove_at(size_t hole) {
    size_t i = hole;
    for (;;) {
      i = (i + 1) & mask_;
      if (!slots_[i].used) break;
      // Moves back what probing would no longer reach over the hole.
      size_t distance = (i - home(slots_[i].key)) & mask_;
      if (distance >= ((i - hole) & mask_)) {
        slots_[hole].key = std::move(slots_[i].key);
        slots_[hole].value = std::move(slots_[i].value);
        hole = i;
      }
    }
    slots_[hole] = Slot{};
    size_--;
  }

  void rehash(size_t slots) {
    std::vector<Slot> old(slots);
    old.swap(slots_);
    mask_ = slots - 1;
    for (Slot& slot : old) {
      if (!slot.used) continue;
      size_t i = home(slot.key);
      while (slots_[i].used) i = (i + 1) & mask_;
      slots_[i] = std::move(slot);
    }
  }

  std::vector<Slot> slots_;
  size_t mask_ = 0;
  size_t size_ = 0;
};

}  // namespace ffs
