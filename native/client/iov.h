// Iov: the buffer that requests read into and write from (docs/ring.md, Iov). Shared memory, so that
// servers of the same host move data straight to and from it, and other processes can share it; or memory
// that somebody else has made, whose data goes through the socket; or memory of a device, which no CPU
// touches and only RDMA reaches (docs/rdma.md, Memory of a device). Any thread; nothing blocks but create
// (page allocation), take_back and remote_key.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "net/rdma/adapter.h"
#include "net/shared_memory.h"

namespace ffs::client {

// Registered with a server in pieces of this size (docs/ring.md, Buffers).
constexpr uint64_t kExtentBytes = 64ull << 20;
constexpr uint64_t kPageBytes = 4096;

struct IovOptions {
  uint64_t size_bytes = 0;  // rounded up to pages
  int numa_node = -1;       // -1: any
  bool huge_pages = false;
  int fd = -1;             // -1: a new memfd; else a shared file to map (duplicated)
  void* memory = nullptr;  // not null: size_bytes of the caller's, which must outlive the Iov
  int dmabuf = -1;         // memory of a device: size_bytes of it, from dmabuf_offset on (duplicated)
  uint64_t dmabuf_offset = 0;
};

class Iov {
 public:
  // EINVAL, ENOMEM (huge pages not reserved), or what the system says.
  static Result<std::unique_ptr<Iov>> create(const IovOptions& options);
  virtual ~Iov();

  uint8_t* data() const { return mapping_.data(); }  // null on a device
  uint64_t size() const { return size_; }
  int fd() const { return fd_.get(); }  // -1 on a device: nobody can map it as an Iov
  bool on_device() const { return dmabuf_.valid(); }
  uint64_t serial() const { return serial_; }  // unique in the process, never used again

  // Whether servers of this host may be given its pages: a sealed memfd of small pages.
  bool shareable() const { return shareable_; }
  // Whether a read may go straight into [offset, offset + length): whole pages in one extent, so
  // that the slice can be taken back on its own.
  bool direct_slice(uint64_t offset, uint64_t length) const {
    return shareable_ && offset % kPageBytes == 0 && length % kPageBytes == 0 &&
           in_one_extent(offset, length);
  }
  bool in_one_extent(uint64_t offset, uint64_t length) const {
    return length > 0 && extent_of(offset) == extent_of(offset + length - 1);
  }
  // Memory of a device is registered whole: the server of no host is given its pages one extent at a time.
  uint64_t extent_of(uint64_t offset) const { return on_device() ? 0 : offset / kExtentBytes; }
  uint64_t extent_begin(uint64_t extent) const { return extent * kExtentBytes; }
  uint64_t extent_bytes(uint64_t extent) const {
    const uint64_t begin = extent_begin(extent);
    return on_device() || size() - begin < kExtentBytes ? size() - begin : kExtentBytes;
  }
  // The region id under which an extent is registered now. Changes when a slice is taken back.
  uint64_t region(uint64_t extent) const { return regions_[extent].load(std::memory_order_acquire); }

  // Before an extent is lent for the first time: its pages are brought in side by side (base/contiguous.h).
  void gather(uint64_t extent);

  // The address of a byte of an extent for an adapter's peers: as in the extent, from the first page on; of a
  // device's memory as in its dmabuf, so that it lies in pages of any size as the device's own address does.
  uint64_t remote_address(uint64_t offset) const {
    if (on_device()) return dmabuf_offset_ + offset;
    return offset % kExtentBytes + reinterpret_cast<uint64_t>(data()) % kPageBytes;
  }
  // The key under which they reach the extent; 0: it can't be registered
  // there (*why says so). Registers it at first use, and anew when a slice of it was taken back, since its
  // pages are others then. The earlier registration ends with a later one, when nobody holds it any more: who
  // may have given its key to a server does, until that is over. All end with the Iov. Blocks: see Adapter.
  struct RemoteKey {
    uint32_t key = 0;
    std::shared_ptr<const void> held;
  };
  RemoteKey remote_key(net::rdma::Adapter& adapter, uint64_t extent, Error* why);
  size_t registrations();

  // Takes [offset, offset + length) (a direct_slice) back from whoever may still write into its
  // pages: they leave the memfd, new ones (zeros) take their place, and the extent gets a new
  // region id. False: a server can touch the slice still (the kernel kept the pages).
  bool take_back(uint64_t offset, uint64_t length);

  // Requests that use it now; destroying is refused meanwhile.
  void use() { uses_.fetch_add(1, std::memory_order_relaxed); }
  void unuse() { uses_.fetch_sub(1, std::memory_order_release); }
  bool used() const { return uses_.load(std::memory_order_acquire) != 0; }

 protected:
  Iov() = default;
  Status open(const IovOptions& options);
  // The descriptor is a dmabuf that has the range: nothing is asked about it any more.
  Status lie_on_device(int dmabuf, uint64_t offset, uint64_t bytes);
  // The seam to the adapter, where tests put memory in a device's place.
  virtual Result<std::unique_ptr<net::rdma::Registration>> register_extent(net::rdma::Adapter& adapter,
                                                                           uint64_t extent);

 private:
  Status adopt(int fd);
  Status place(int numa_node);
  void make_extents(bool gathered);

  Fd fd_;
  net::Mapping mapping_;
  uint64_t size_ = 0;
  Fd dmabuf_;
  uint64_t dmabuf_offset_ = 0;
  bool shareable_ = false;
  uint64_t serial_ = 0;
  std::unique_ptr<std::atomic<uint64_t>[]> regions_;  // by extent
  std::atomic<uint64_t> uses_{0};
  std::unique_ptr<std::atomic<bool>[]> gathered_;  // by extent: its pages
  struct Registered {
    uint32_t adapter;
    uint64_t extent;
    uint64_t region;  // id at the time
    std::unique_ptr<net::rdma::Registration> memory;
    std::shared_ptr<const void> held;
  };
  std::mutex registered_mutex_;
  std::vector<Registered> registered_;  // an old one too: reads into other slices may be under way with it
};

// The Iovs that exist, so that a handle can be checked before it is used and rings can drop the
// regions of those that are gone.
class IovRegistry {
 public:
  static void add(Iov* iov);
  // EBUSY while requests use it; ENOENT: no such Iov.
  static Status remove(Iov* iov);
  // Whether it exists; if so it is marked used (unuse() ends that).
  static bool acquire(Iov* iov);
  static bool alive(uint64_t serial);
  // Of an Iov that isn't for requests to name: a ring's own (landing.h). It counts as alive.
  static void begin_own(uint64_t serial);
  static void end_own(uint64_t serial);
  // Grows with each Iov that goes.
  static uint64_t removals();
};

}  // namespace ffs::client
