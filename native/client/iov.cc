#include "client/iov.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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
  iov->serial_ = next_serial.fetch_add(1);
  if (options.memory != nullptr) {
    if (options.fd >= 0 || options.huge_pages || options.numa_node >= 0) {
      return Error::of(EINVAL, "memory of the caller is as it is: no descriptor, huge pages or NUMA node");
    }
    if (options.size_bytes == 0) return Error::of(EINVAL, "an Iov needs at least one byte");
    iov->mapping_ = net::Mapping::borrowed(options.memory, options.size_bytes);
  } else if (options.fd >= 0) {
    if (options.huge_pages) return Error::of(EINVAL, "huge pages are chosen by who makes the shared file");
    FFS_TRY_STATUS(iov->adopt(options.fd));
  } else {
    if (options.size_bytes == 0) return Error::of(EINVAL, "an Iov needs at least one byte");
    if (options.size_bytes > (1ull << 46)) return Error::of(EINVAL, "an Iov has at most 64 TiB");
    const uint64_t bytes = round_up(options.size_bytes, options.huge_pages ? kHugePageBytes : kPageBytes);
    FFS_TRY(iov->fd_, net::create_sealed_memfd("ffs-iov", bytes, options.huge_pages));
    auto mapping = net::map_shared(iov->fd_.get(), 0, bytes, true);
    if (!mapping.ok() && options.huge_pages && mapping.error().code == ENOMEM) {
      return Error::of(ENOMEM, "too few huge pages are reserved: raise vm.nr_hugepages");
    }
    if (!mapping.ok()) return mapping.error();
    iov->mapping_ = std::move(*mapping);
    // A slice in a huge page can't be taken back on its own, so it isn't lent out (docs/ring.md).
    iov->shareable_ = !options.huge_pages;
  }
  if (!iov->mapping_.valid()) return Error::of(ENOMEM, "mapping shared memory");
#ifdef MADV_NOHUGEPAGE
  if (iov->shareable_) ::madvise(iov->data(), iov->size(), MADV_NOHUGEPAGE);  // taking back goes by 4 KiB
#endif
  FFS_TRY_STATUS(iov->place(options.numa_node));
  const uint64_t extents = (iov->size() + kExtentBytes - 1) / kExtentBytes;
  iov->regions_.reset(new std::atomic<uint64_t>[extents]);
  iov->gathered_.reset(new std::atomic<bool>[extents]);
  for (uint64_t i = 0; i < extents; i++) {
    iov->regions_[i] = next_region.fetch_add(1);
    iov->gathered_[i] = options.fd >= 0 || options.memory != nullptr;  // whoever made it has seen to that
  }
  return iov;
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

uint32_t Iov::remote_key(net::rdma::Adapter& adapter, uint64_t extent, Error* why) {
  std::lock_guard lock(registered_mutex_);
  const uint64_t id = region(extent);
  for (const Registered& one : registered_) {
    if (one.region == id && one.adapter == adapter.index()) return one.memory->remote_key();
  }
  gather(extent);
  auto memory = adapter.register_memory(data() + extent_begin(extent), extent_bytes(extent),
                                        remote_address(extent_begin(extent)), net::rdma::Access::kThere);
  if (!memory.ok()) return *why = memory.error(), 0;
  registered_.push_back({adapter.index(), id, std::move(*memory)});
  return registered_.back().memory->remote_key();
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

bool IovRegistry::alive(uint64_t serial) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  return r.alive.count(serial) != 0;
}

uint64_t IovRegistry::removals() {
  return registry().removals.load(std::memory_order_acquire);
}

}  // namespace ffs::client
