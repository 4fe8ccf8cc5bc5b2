// Memory of a device, which no CPU touches: its requests go over RDMA, checked by the server, or not at all
// (docs/rdma.md, Memory of a device).
#include <cerrno>

#include "client/ring.h"

namespace ffs::client {

using wire::Detail;

// A waiting request that this link can't carry. True: it has ended.
bool Ring::refuses_device(Link& link, uint32_t index) {
  const Slot& slot = slots_[index];
  uint32_t fault = 0;
  int code = EOPNOTSUPP;
  if (!link.rdma()) {
    fault = FFS_DEVICE_TRANSPORT;
  } else if (slot.rdma_refused) {
    fault = FFS_DEVICE_REACH;
    code = ENXIO;
  } else if (link.region(*slot.iov(), slot.sqe.iov_offset, slot.sqe.length, !slot.update) == 0) {
    fault = FFS_DEVICE_REGISTER;
    code = link.device_refusal();
    FFS_CHECK(code > 0);
  }
  if (fault == 0) return false;
  detach(index);
  fail_device(index, fault, code);
  return true;
}

// From no list; no server touches the slice.
void Ring::fail_device(uint32_t index, uint32_t fault, int code) {
  Slot& slot = slots_[index];
  const Link& link = *slot.link;
  slot.direct_read = false;
  slot.value = slot.target.value;
  const uint32_t transport = link.rdma()    ? FFS_TRANSPORT_RDMA
                             : link.local() ? FFS_TRANSPORT_LOCAL
                                            : FFS_TRANSPORT_TCP;
  finish(index, -code, static_cast<Detail>(fault + transport * 256), !slot.lost_try);
}

}  // namespace ffs::client
