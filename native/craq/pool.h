// Memory that is kept: a pool of records with stable addresses, an intrusive list, an intrusive
// hash index. Nothing here frees memory before its end, so the steady state allocates nothing.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/check.h"

namespace ffs::craq {

// Records of type T; take() gives a default one. T has a member `T* next_free`.
template <typename T>
class Pool {
 public:
  T* take() {
    if (free_ == nullptr) grow();
    T* record = free_;
    free_ = record->next_free;
    *record = T{};
    used_++;
    return record;
  }
  void give(T* record) {
    FFS_CHECK(used_ > 0);
    used_--;
    record->next_free = free_;
    free_ = record;
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t kSlab = 64;
  void grow() {
    slabs_.push_back(std::make_unique<T[]>(kSlab));
    for (size_t i = kSlab; i > 0; i--) {
      T* record = &slabs_.back()[i - 1];
      record->next_free = free_;
      free_ = record;
    }
  }
  std::vector<std::unique_ptr<T[]>> slabs_;
  T* free_ = nullptr;
  size_t used_ = 0;
};

template <typename T>
struct Link {
  T* prev = nullptr;
  T* next = nullptr;
  bool linked = false;
};

// A doubly linked list through the member `L` of its elements.
template <typename T, Link<T> T::*L>
class List {
 public:
  T* first() const { return first_; }
  T* last() const { return last_; }
  bool empty() const { return first_ == nullptr; }
  static T* next(const T* e) { return (e->*L).next; }
  static T* prev(const T* e) { return (e->*L).prev; }
  static bool linked(const T* e) { return (e->*L).linked; }

  void push_back(T* e) { insert_after(last_, e); }
  // after == nullptr: at the front.
  void insert_after(T* after, T* e) {
    FFS_CHECK(!linked(e));
    T* before = after != nullptr ? (after->*L).next : first_;
    e->*L = Link<T>{after, before, true};
    (after != nullptr ? (after->*L).next : first_) = e;
    (before != nullptr ? (before->*L).prev : last_) = e;
  }
  void remove(T* e) {
    FFS_CHECK(linked(e));
    Link<T> l = e->*L;
    (l.prev != nullptr ? (l.prev->*L).next : first_) = l.next;
    (l.next != nullptr ? (l.next->*L).prev : last_) = l.prev;
    e->*L = Link<T>{};
  }
  T* pop_front() {
    T* e = first_;
    if (e != nullptr) remove(e);
    return e;
  }

 private:
  T* first_ = nullptr;
  T* last_ = nullptr;
};

// A hash index of records through their member `T* hash_next`. Traits: Key, key(const T&),
// hash(const Key&).
template <typename T, typename Traits>
class HashIndex {
 public:
  using Key = typename Traits::Key;
  HashIndex() : buckets_(1024, nullptr) {}

  T* find(const Key& key) const {
    for (T* e = buckets_[slot(key)]; e != nullptr; e = e->hash_next) {
      if (Traits::key(*e) == key) return e;
    }
    return nullptr;
  }
  void insert(T* e) {
    if (++size_ > buckets_.size()) rehash();
    T*& head = buckets_[slot(Traits::key(*e))];
    e->hash_next = head;
    head = e;
  }
  // False if that record isn't in the index.
  bool remove(T* e) {
    for (T** at = &buckets_[slot(Traits::key(*e))]; *at != nullptr; at = &(*at)->hash_next) {
      if (*at != e) continue;
      *at = e->hash_next;
      e->hash_next = nullptr;
      size_--;
      return true;
    }
    return false;
  }
  size_t size() const { return size_; }

 private:
  size_t slot(const Key& key) const { return Traits::hash(key) & (buckets_.size() - 1); }
  void rehash() {
    std::vector<T*> old(buckets_.size() * 2, nullptr);
    old.swap(buckets_);
    for (T* e : old) {
      while (e != nullptr) {
        T* following = e->hash_next;
        T*& head = buckets_[slot(Traits::key(*e))];
        e->hash_next = head;
        head = e;
        e = following;
      }
    }
  }
  std::vector<T*> buckets_;
  size_t size_ = 0;
};

}  // namespace ffs::craq
