#include "client/iov.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "base/contiguous.h"

namespace ffs::client {

namespace {

constexpr int kMpolBind = 2;
constexpr uint64_t kHugePageBytes = 2ull << 20;
constexpr int kMaxNumaNodes = 1024;

// Region ids are unique in the process, so in each client session too, and are never used again.
std::atomic<uint64_t> next_region{1};
std::atomic<uint64_t> next_serial{1};

uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

Status check_dmabuf(int fd, uint64_t offset, uint64_t bytes) {
  struct statfs kind;
  if (::fstatfs(fd, &kind) != 0) return Error::of(errno, "the descriptor of a device's memory");
  if (kind.f_type != DMA_BUF_MAGIC) {
    return Error::of(EINVAL, "the descriptor is no dmabuf: give one that a device's driver exports");
  }
  const off_t end = ::lseek(fd, 0, SEEK_END);  // of a dmabuf that asks for its size, and moves nothing
  if (end < 0) return Error::of(errno, "asking for the size of a dmabuf");
  const auto size = static_cast<uint64_t>(end);
  if (bytes == 0) return Error::of(EINVAL, "an Iov needs at least one byte");
  if (offset > size || bytes > size - offset) {
    return Error::of(EINVAL, "the dmabuf ends before offset + size: give a range inside it");
  }
  return ok_status();
}

struct Registry {
  std::mutex mutex;
  std::unordered_map<Iov*, uint64_t> serials;
  std::unordered_set<uint64_t> alive;
  std::atomic<uint64_t> removals{0};
};

Registry& registry() {
  static Registry* const instance = new Registry;  // never destroyed: rings may outlive main()
  return *instance;
}

}  // namespace

Result<std::unique_ptr<Iov>> Iov::create(const IovOptions& options) {
  std::unique_ptr<Iov> iov(new Iov);
  FFS_TRY_STATUS(iov->open(options));
  return iov;
}

Status Iov::open(const IovOptions& options) {
  serial_ = next_serial.fetch_add(1);
  if (options.dmabuf >= 0) {
    FFS_TRY_STATUS(check_dmabuf(options.dmabuf, options.dmabuf_offset, options.size_bytes));
    return lie_on_device(options.dmabuf, options.dmabuf_offset, options.size_bytes);
  }
  if (options.memory != nullptr) {
    if (options.fd >= 0 || options.huge_pages || options.numa_node >= 0) {
      return Error::of(EINVAL, "memory of the caller is as it is: no descriptor, huge pages or NUMA node");
    }
    if (options.size_bytes == 0) return Error::of(EINVAL, "an Iov needs at least one byte");
    mapping_ = net::Mapping::borrowed(options.memory, options.size_bytes);
  } else if (options.fd >= 0) {
    if (options.huge_pages) return Error::of(EINVAL, "huge pages are chosen by who makes the shared file");
    FFS_TRY_STATUS(adopt(options.fd));
  } else {
    if (options.size_bytes == 0) return Error::of(EINVAL, "an Iov needs at least one byte");
    if (options.size_bytes > (1ull << 46)) return Error::of(EINVAL, "an Iov has at most 64 TiB");
    const uint64_t bytes = round_up(options.size_bytes, options.huge_pages ? kHugePageBytes : kPageBytes);
    FFS_TRY(fd_, net::create_sealed_memfd("ffs-iov", bytes, options.huge_pages));
    auto mapping = net::map_shared(fd_.get(), 0, bytes, true);
    if (!mapping.ok() && options.huge_pages && mapping.error().code == ENOMEM) {
      return Error::of(ENOMEM, "too few huge pages are reserved: raise vm.nr_hugepages");
    }
    if (!mapping.ok()) return mapping.error();
    mapping_ = std::move(*mapping);
    // A slice in a huge page can't be taken back on its own, so it isn't lent out (docs/ring.md).
    shareable_ = !options.huge_pages;
  }
  if (!mapping_.valid()) return Error::of(ENOMEM, "mapping shared memory");
#ifdef MADV_NOHUGEPAGE
  if (shareable_) ::madvise(data(), mapping_.size(), MADV_NOHUGEPAGE);  // taking back goes by 4 KiB
#endif
  size_ = mapping_.size();
  FFS_TRY_STATUS(place(options.numa_node));
  make_extents(options.fd >= 0 || options.memory != nullptr);  // whoever made it has seen to that
  return ok_status();
}

Status Iov::lie_on_device(int dmabuf, uint64_t offset, uint64_t bytes) {
  serial_ = next_serial.fetch_add(1);
  dmabuf_.reset(::fcntl(dmabuf, F_DUPFD_CLOEXEC, 0));
  if (!dmabuf_.valid()) return Error::of(errno, "duplicating the dmabuf's descriptor");
  dmabuf_offset_ = offset;
  size_ = bytes;
  make_extents(true);
  return ok_status();
}

void Iov::make_extents(bool gathered) {
  const uint64_t extents = extent_of(size_ - 1) + 1;
  regions_.reset(new std::atomic<uint64_t>[extents]);
  gathered_.reset(new std::atomic<bool>[extents]);
  for (uint64_t i = 0; i < extents; i++) {
    regions_[i] = next_region.fetch_add(1);
    gathered_[i] = gathered;
  }
}

Iov::~Iov() = default;

// Maps a shared file of somebody else (a worker process that was given the descriptor).
Status Iov::adopt(int fd) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return Error::of(errno, "fstat of the Iov's descriptor");
  const auto bytes = static_cast<uint64_t>(info.st_size);
  if (bytes == 0 || bytes % kPageBytes != 0) {
    return Error::of(EINVAL, "a shared file for an Iov has a size that is a multiple of 4096, not 0");
  }
  fd_.reset(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!fd_.valid()) return Error::of(errno, "duplicating the Iov's descriptor");
  FFS_TRY(mapping_, net::map_shared(fd_.get(), 0, bytes, true));
  // Without seals it could shrink under a server: data then goes through the socket.
  // Sealed against writing, or in huge pages, no slice of it could be taken back.
  const int seals = ::fcntl(fd_.get(), F_GET_SEALS);
  shareable_ = net::check_sealed(fd_.get(), 0, bytes).ok() && info.st_blksize == kPageBytes &&
               (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) == 0;
  return ok_status();
}

Status Iov::place(int numa_node) {
  if (numa_node < 0) return ok_status();
  if (numa_node >= kMaxNumaNodes) return Error::of(EINVAL, "the NUMA node doesn't exist");
  unsigned long mask[kMaxNumaNodes / (8 * sizeof(unsigned long))] = {};
  mask[static_cast<size_t>(numa_node) / (8 * sizeof(unsigned long))] |=
      1ul << (numa_node % (8 * sizeof(unsigned long)));
  if (::syscall(SYS_mbind, data(), size(), kMpolBind, mask, kMaxNumaNodes, 0) != 0) {
    return Error::of(errno,
                     errno == EINVAL ? "the NUMA node doesn't exist" : "placing memory on the NUMA node");
  }
  return ok_status();
}

void Iov::gather(uint64_t extent) {
  if (gathered_[extent].exchange(true)) return;
  gather_pages(fd_.get(), extent_begin(extent), extent_bytes(extent));
}

Iov::RemoteKey Iov::remote_key(net::rdma::Adapter& adapter, uint64_t extent, Error* why) {
  std::lock_guard lock(registered_mutex_);
  const uint64_t id = region(extent);
  for (const Registered& one : registered_) {
    if (one.region == id && one.adapter == adapter.index()) return {one.memory->remote_key(), one.held};
  }
  // Nobody is given the key of an earlier one any more.
  std::erase_if(registered_, [&](const Registered& one) {
    return one.extent == extent && one.region != id && one.held.use_count() == 1;
  });
  gather(extent);
  auto memory = register_extent(adapter, extent);
  if (!memory.ok()) return *why = memory.error(), RemoteKey{};
  const uint32_t key = (*memory)->remote_key();
  registered_.push_back({adapter.index(), extent, id, std::move(*memory), std::make_shared<char>()});
  return {key, registered_.back().held};
}

size_t Iov::registrations() {
  std::lock_guard lock(registered_mutex_);
  return registered_.size();
}

Result<std::unique_ptr<net::rdma::Registration>> Iov::register_extent(net::rdma::Adapter& adapter,
                                                                      uint64_t extent) {
  const uint64_t begin = extent_begin(extent), bytes = extent_bytes(extent);
  const uint64_t address = remote_address(begin);
  if (on_device()) {
    return adapter.register_dmabuf(dmabuf_.get(), dmabuf_offset_ + begin, bytes, address,
                                   net::rdma::Access::kThere);
  }
  return adapter.register_memory(data() + begin, bytes, address, net::rdma::Access::kThere);
}

bool Iov::take_back(uint64_t offset, uint64_t length) {
  FFS_CHECK(direct_slice(offset, length));
  const auto at = static_cast<off_t>(offset);
  const auto bytes = static_cast<off_t>(length);
  if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, bytes) != 0) return false;
  // A page that the kernel could not take out (part of a larger one that is pinned) is still data.
  const off_t data_at = ::lseek(fd_.get(), at, SEEK_DATA);
  if (data_at >= 0 ? data_at < at + bytes : errno != ENXIO) return false;
  regions_[extent_of(offset)].store(next_region.fetch_add(1), std::memory_order_release);
  return true;
}

void IovRegistry::add(Iov* iov) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  r.serials.emplace(iov, iov->serial());
  r.alive.insert(iov->serial());
}

Status IovRegistry::remove(Iov* iov) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  auto found = r.serials.find(iov);
  if (found == r.serials.end()) return Error::of(ENOENT, "no such Iov (closed already?)");
  if (iov->used()) return Error::of(EBUSY, "requests use the Iov: wait for them or cancel them first");
  r.alive.erase(found->second);
  r.serials.erase(found);
  r.removals.fetch_add(1);
  return ok_status();
}

bool IovRegistry::acquire(Iov* iov) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  if (r.serials.find(iov) == r.serials.end()) return false;
  iov->use();
  return true;
}

void IovRegistry::begin_own(uint64_t serial) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  r.alive.insert(serial);
}

void IovRegistry::end_own(uint64_t serial) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  r.alive.erase(serial);
}

bool IovRegistry::alive(uint64_t serial) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  return r.alive.count(serial) != 0;
}

uint64_t IovRegistry::removals() {
  return registry().removals.load(std::memory_order_acquire);
}

}  // namespace ffs::client
