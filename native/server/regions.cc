#include "server/regions.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include "base/check.h"
#include "server/log.h"

namespace ffs::server {

namespace {

Status check_extent(const Fd& fd, uint64_t offset, uint64_t size) {
  if (!fd.valid()) return Error::of(EINVAL, "a region came without its descriptor");
  if (size == 0 || size > io::kClientExtentBytes) return Error::of(EINVAL, "a region has 4 KiB to 64 MiB");
  if (offset % io::kBlockBytes != 0 || size % io::kBlockBytes != 0) {
    return Error::of(EINVAL, "a region's offset and size must be multiples of 4096");
  }
  return net::check_sealed(fd.get(), offset, size);
}

}  // namespace

Result<ClientRegion*> Regions::add(ClientId client, uint64_t id, Fd fd, uint64_t offset, uint64_t size) {
  FFS_TRY_STATUS(check_extent(fd, offset, size));
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return Error::of(errno, "fstat of a region");
  const Key key{client.value, id};
  if (auto found = regions_.find(key); found != regions_.end()) {
    ClientRegion* region = found->second.get();
    if (region->device != info.st_dev || region->inode != info.st_ino || region->offset != offset ||
        region->size != size) {
      return Error::of(EEXIST, "the region id names other memory already");
    }
    region->registrations++;
    return region;
  }
  uint64_t& used = client_bytes_[client.value];
  if (used + size > limit_bytes_) return Error::of(EDQUOT, "the client's limit of registered memory");
  struct statfs filesystem;
  if (::fstatfs(fd.get(), &filesystem) != 0) return Error::of(errno, "fstatfs of a region");

  auto region = std::make_unique<ClientRegion>();
  region->client = client;
  region->id = id;
  region->size = size;
  region->offset = offset;
  region->device = info.st_dev;
  region->inode = info.st_ino;
  region->fd = std::move(fd);
  region->huge_pages = filesystem.f_type == HUGETLBFS_MAGIC;
  region->registrations = 1;
  region->owner = this;
  region->work.region = region.get();
  region->work.work = prepare;
  region->work.op.done = prepared;
  used += size;
  bytes_ += size;
  ClientRegion* raw = region.get();
  regions_.emplace(key, std::move(region));
  raw->uses++;  // the helper thread's
  io_.offload(&raw->work);
  return raw;
}

// On the helper thread: a writable mapping, as registering pages for reads needs one, and its pages.
int32_t Regions::prepare(io::Offload* offload) {
  ClientRegion* region = static_cast<ClientRegion::Work*>(offload)->region;
  auto mapping = net::map_shared(region->fd.get(), region->offset, region->size, true);
  if (!mapping.ok()) return -mapping.error().code;
  region->mapping = std::move(*mapping);
  // A hint only: pages that can't be had now fail at registration.
  (void)::madvise(region->mapping.data(), region->size, MADV_POPULATE_WRITE);
  return 0;
}

void Regions::prepared(io::Op* op) {
  ClientRegion* region = static_cast<ClientRegion::Work*>(reinterpret_cast<io::Offload*>(op))->region;
  Regions* self = region->owner;
  if (op->result < 0) {
    region->error = -op->result;
  } else {
    auto registered = self->io_.register_region(region->mapping.data(), region->size);
    if (registered.ok()) {
      region->registered = *registered;
      region->registered.foreign = true;
    } else {
      log(LogLevel::kDebug, "region %llu: reads go through server memory: %s",
          static_cast<unsigned long long>(region->id), registered.error().what);
    }
    // From here on no instruction of ours can write the client's memory.
    if (::mprotect(region->mapping.data(), region->size, PROT_READ) != 0) region->error = errno;
  }
  if (region->state == ClientRegion::State::kPreparing) {
    region->state = region->error == 0 ? ClientRegion::State::kReady : ClientRegion::State::kFailed;
    self->settled_(self->owner_, region);
  }
  self->unuse(region);
}

void Regions::drop(ClientRegion* region) {
  FFS_CHECK(region->registrations > 0);
  if (--region->registrations > 0) return;
  auto found = regions_.find(Key{region->client.value, region->id});
  FFS_CHECK(found != regions_.end() && found->second.get() == region);
  (void)found->second.release();  // owned by its last use from here on
  regions_.erase(found);
  draining_++;
  auto& used = client_bytes_[region->client.value];
  used -= region->size;
  if (used == 0) client_bytes_.erase(region->client.value);
  bytes_ -= region->size;
  region->state = ClientRegion::State::kDraining;
  end_if_unused(region);
}

void Regions::unuse(ClientRegion* region) {
  FFS_CHECK(region->uses > 0);
  region->uses--;
  if (region->state == ClientRegion::State::kDraining) end_if_unused(region);
}

void Regions::end_if_unused(ClientRegion* region) {
  if (region->uses > 0) return;
  if (region->registered.registered()) io_.unregister_region(region->registered);
  region->registered = {};
  region->uses = 1;  // the helper thread's: ends here once
  region->work.work = unmap;
  region->work.op.done = unmapped;
  io_.offload(&region->work);
}

int32_t Regions::unmap(io::Offload* offload) {
  static_cast<ClientRegion::Work*>(offload)->region->mapping.reset();
  return 0;
}

void Regions::unmapped(io::Op* op) {
  ClientRegion* region = static_cast<ClientRegion::Work*>(reinterpret_cast<io::Offload*>(op))->region;
  Regions* self = region->owner;
  self->gone_(self->owner_, region);
  self->draining_--;
  delete region;
}

}  // namespace ffs::server
