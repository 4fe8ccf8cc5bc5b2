// A build without the headers of libibverbs: nothing of RDMA can be reached, as Adapters::get says so.
#if !FFS_HAVE_VERBS
#include "net/rdma/adapter.h"
#include "net/rdma/verbs_pair.h"

namespace ffs::net::rdma {

namespace {
const Error kAbsent =
    Error::of(ENOTSUP, "this build has no RDMA: libibverbs-dev wasn't there when it was built");
}

int numa_node_here() {
  return -1;
}
Registration::~Registration() = default;
Result<std::unique_ptr<Registration>> Adapter::register_memory(void*, size_t, uint64_t, Access) {
  return kAbsent;
}
Result<std::unique_ptr<Registration>> Adapter::register_dmabuf(int, uint64_t, size_t, uint64_t, Access) {
  return kAbsent;
}
Result<const Adapters*> Adapters::get(const std::string&, std::string*) {
  return kAbsent;
}
Adapter* Adapters::pick(int, int, int) const {
  return nullptr;
}
Result<std::unique_ptr<Events>> Events::create(Adapter&) {
  return kAbsent;
}
Events::~Events() = default;
int Events::fd() const {
  return -1;
}
void Events::take(std::vector<void*>*) {}
Result<std::unique_ptr<VerbsPair>> VerbsPair::create(Adapter&, Events&, void*, const Shape&, Access) {
  return kAbsent;
}
VerbsPair::~VerbsPair() = default;
Status VerbsPair::connect(const wire::RdmaEnd&, uint8_t) {
  return kAbsent;
}
std::unique_ptr<Channel> VerbsPair::channel(std::unique_ptr<VerbsPair>, const wire::RdmaEnd&) {
  return nullptr;
}
Status VerbsPair::post(std::span<const Work>) {
  return kAbsent;
}
Status VerbsPair::post_receives(std::span<const uint32_t>) {
  return kAbsent;
}
int VerbsPair::poll(std::span<Completion>) {
  return -1;
}
Status VerbsPair::arm() {
  return kAbsent;
}
const char* VerbsPair::fault_name(uint32_t) const {
  return "no RDMA";
}

}  // namespace ffs::net::rdma
#endif
