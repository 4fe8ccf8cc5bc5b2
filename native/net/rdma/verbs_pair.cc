#if FFS_HAVE_VERBS
#include "net/rdma/verbs_pair.h"

#include <arpa/inet.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "net/mac.h"
#include "net/rdma/verbs.h"

namespace ffs::net::rdma {

namespace {

// docs/rdma.md, When it breaks: an acknowledgement is awaited for 4.096 us << 15 = 134 ms, seven times; rxe
// takes a retry count of 7 for "for ever".
constexpr uint8_t kTimeout = 15;
constexpr uint8_t kRetries = 6;
constexpr uint8_t kRnrRetries = 6;
constexpr uint8_t kRnrTimer = 12;  // 0.64 ms
constexpr uint8_t kHops = 64;
constexpr uint32_t kInlineBytes = 256;
constexpr int kBatch = 64;

static_assert(IBV_WC_REM_INV_REQ_ERR == 9 && IBV_WC_REM_ACCESS_ERR == 10 && IBV_WC_REM_OP_ERR == 11,
              "channel.cc knows these numbers");

}  // namespace

Result<std::unique_ptr<VerbsPair>> VerbsPair::create(Adapter& adapter, Events& events, void* owner,
                                                     const Shape& shape, Access access) {
  std::unique_ptr<VerbsPair> pair(new VerbsPair(adapter));
  const Verbs& v = *adapter.verbs;
  pair->shape_ = shape;
  pair->shape_.most_bytes = std::min(shape.most_bytes, adapter.most_message_bytes);
  const size_t bytes = channel_memory_bytes(shape);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return Error::of(errno, "memory for RDMA messages");
  pair->memory_ = Mapping(memory, bytes);
  // A child's first write would part it from what the device knows.
  if (::madvise(memory, bytes, MADV_DONTFORK) != 0) return Error::of(errno, "memory for RDMA messages");
  FFS_TRY(pair->registration_,
          adapter.register_memory(memory, bytes, reinterpret_cast<uint64_t>(memory), Access::kHere));
  pair->completions_ = v.create_cq(adapter.context, static_cast<int>(shape.receives + shape.depth + 1), owner,
                                   events.channel(), 0);
  if (pair->completions_ == nullptr) return Error::of(errno, "creating an RDMA completion queue");

  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = pair->completions_;
  wanted.qp_type = IBV_QPT_RC;
  wanted.sq_sig_all = 0;
  for (const uint32_t inline_bytes : {kInlineBytes, 0u}) {  // not every device has so much
    wanted.cap = {};
    wanted.cap.max_send_wr = shape.depth;
    wanted.cap.max_recv_wr = shape.receives;
    wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
    wanted.cap.max_inline_data = inline_bytes;
    pair->queues_ = v.create_qp(adapter.pd, &wanted);
    if (pair->queues_ != nullptr) break;
  }
  if (pair->queues_ == nullptr) return Error::of(errno, "creating an RDMA queue pair");
  pair->shape_.inline_bytes = std::min(wanted.cap.max_inline_data, kInlineBytes);

  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = adapter.port().port;
  attributes.qp_access_flags = access == Access::kThere
                                   ? IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_LOCAL_WRITE
                                   : IBV_ACCESS_LOCAL_WRITE;
  if (int code = v.modify_qp(pair->queues_, &attributes,
                             IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) {
    return Error::of(code, "initialising an RDMA queue pair");
  }
  std::vector<uint32_t> all(shape.receives);
  for (uint32_t i = 0; i < shape.receives; i++) all[i] = i;
  FFS_TRY_STATUS(pair->post_receives(all));

  uint32_t random = 0;
  if (!random_bytes({reinterpret_cast<uint8_t*>(&random), sizeof random}))
    return Error::of(EIO, "random bytes");
  wire::RdmaEnd& end = pair->end_;
  end.queue_pair = pair->queues_->qp_num;
  end.first_packet = random & 0xffffff;
  std::memcpy(end.gid, adapter.gid().gid.data(), sizeof end.gid);
  end.lid = adapter.port().lid;
  end.mtu = adapter.port().active_mtu;
  end.ethernet = adapter.port().ethernet ? 1 : 0;
  end.reads_in = adapter.reads_in;
  end.reads_out = adapter.reads_out;
  end.receives = shape.receives;
  end.message_bytes = shape.message_bytes;
  return pair;
}

Status VerbsPair::connect(const wire::RdmaEnd& theirs, uint8_t traffic_class) {
  FFS_TRY(const Agreement agreed, agree(end_, theirs));
  const Verbs& v = *adapter_.verbs;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(agreed.mtu);
  attributes.dest_qp_num = theirs.queue_pair;
  attributes.rq_psn = theirs.first_packet;
  attributes.max_dest_rd_atomic = end_.reads_in;
  attributes.min_rnr_timer = kRnrTimer;
  attributes.ah_attr.dlid = theirs.lid;
  attributes.ah_attr.port_num = adapter_.port().port;
  attributes.ah_attr.is_global = theirs.ethernet != 0 || theirs.lid == 0 ? 1 : 0;
  std::memcpy(attributes.ah_attr.grh.dgid.raw, theirs.gid, sizeof theirs.gid);
  attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(adapter_.gid().index);
  attributes.ah_attr.grh.hop_limit = kHops;
  attributes.ah_attr.grh.traffic_class = traffic_class;
  if (int code = v.modify_qp(queues_, &attributes,
                             IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) {
    return Error::of(code, "an RDMA queue pair can't reach the other end's address");
  }
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = end_.first_packet;
  attributes.timeout = kTimeout;
  attributes.retry_cnt = kRetries;
  attributes.rnr_retry = kRnrRetries;
  attributes.max_rd_atomic = agreed.reads_from_them;
  if (int code = v.modify_qp(queues_, &attributes,
                             IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                 IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)) {
    return Error::of(code, "an RDMA queue pair can't be brought to send");
  }
  return ok_status();
}

std::unique_ptr<Channel> VerbsPair::channel(std::unique_ptr<VerbsPair> pair, const wire::RdmaEnd& theirs) {
  VerbsPair* raw = pair.get();
  return std::make_unique<Channel>(std::move(pair), raw->shape_, raw->memory_.data(),
                                   raw->registration_->local_key(), theirs.receives, theirs.message_bytes);
}

// Destroying a queue pair waits for what it has under way: nothing of it touches memory afterwards.
VerbsPair::~VerbsPair() {
  if (process_ != ::getpid()) {  // the parent's
    (void)registration_.release();
    (void)new Mapping(std::move(memory_));
    return;
  }
  const Verbs& v = *adapter_.verbs;
  if (queues_ != nullptr) {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_ERR;
    (void)v.modify_qp(queues_, &attributes, IBV_QP_STATE);
    FFS_CHECK(v.destroy_qp(queues_) == 0);
  }
  if (completions_ != nullptr) FFS_CHECK(v.destroy_cq(completions_) == 0);
}

Status VerbsPair::post(std::span<const Work> work) {
  size_t done = 0;
  while (done < work.size()) {
    ibv_send_wr requests[kBatch];
    ibv_sge pieces[kBatch];
    const size_t count = std::min<size_t>(work.size() - done, kBatch);
    for (size_t i = 0; i < count; i++) {
      const Work& one = work[done + i];
      ibv_send_wr& request = requests[i];
      request = {};
      pieces[i] = {reinterpret_cast<uint64_t>(one.memory), one.length, one.local_key};
      request.wr_id = one.number << 1;
      request.sg_list = &pieces[i];
      request.num_sge = one.length > 0 ? 1 : 0;
      request.next = i + 1 < count ? &requests[i + 1] : nullptr;
      request.send_flags =
          (one.signalled ? static_cast<unsigned int>(IBV_SEND_SIGNALED) : 0u) |
          (one.inlined && shape_.inline_bytes > 0 ? static_cast<unsigned int>(IBV_SEND_INLINE) : 0u);
      switch (one.kind) {
        case WorkKind::kSend:
          request.opcode = IBV_WR_SEND_WITH_IMM;
          request.imm_data = htonl(one.immediate);
          break;
        case WorkKind::kWrite:
          request.opcode = IBV_WR_RDMA_WRITE;
          break;
        case WorkKind::kRead:
          request.opcode = IBV_WR_RDMA_READ;
          break;
      }
      if (one.kind != WorkKind::kSend) {
        request.wr.rdma.remote_addr = one.remote;
        request.wr.rdma.rkey = one.remote_key;
      }
    }
    ibv_send_wr* bad = nullptr;
    if (int code = ibv_post_send(queues_, requests, &bad)) {
      return Error::of(code > 0 ? code : EIO, "posting to an RDMA send queue failed");
    }
    done += count;
  }
  return ok_status();
}

Status VerbsPair::post_receives(std::span<const uint32_t> buffers) {
  size_t done = 0;
  while (done < buffers.size()) {
    ibv_recv_wr requests[kBatch];
    ibv_sge pieces[kBatch];
    const size_t count = std::min<size_t>(buffers.size() - done, kBatch);
    for (size_t i = 0; i < count; i++) {
      const uint32_t buffer = buffers[done + i];
      pieces[i] = {reinterpret_cast<uint64_t>(memory_.data() + size_t{buffer} * shape_.message_bytes),
                   shape_.message_bytes, registration_->local_key()};
      requests[i] = {};
      requests[i].wr_id = uint64_t{buffer} << 1 | 1;
      requests[i].sg_list = &pieces[i];
      requests[i].num_sge = 1;
      requests[i].next = i + 1 < count ? &requests[i + 1] : nullptr;
    }
    ibv_recv_wr* bad = nullptr;
    if (int code = ibv_post_recv(queues_, requests, &bad)) {
      return Error::of(code > 0 ? code : EIO, "posting to an RDMA receive queue failed");
    }
    done += count;
  }
  return ok_status();
}

int VerbsPair::poll(std::span<Completion> out) {
  ibv_wc found[kBatch];
  const int most = static_cast<int>(std::min<size_t>(out.size(), kBatch));
  const int count = ibv_poll_cq(completions_, most, found);
  for (int i = 0; i < count; i++) {
    const ibv_wc& one = found[i];
    Completion& completion = out[static_cast<size_t>(i)];
    completion = {};
    completion.received = (one.wr_id & 1) != 0;  // the opcode of a failed one isn't told
    completion.number = one.wr_id >> 1;
    completion.fault = static_cast<uint32_t>(one.status);
    if (completion.received && completion.fault == 0) {
      completion.bytes = one.byte_len;
      completion.immediate = (one.wc_flags & IBV_WC_WITH_IMM) != 0 ? ntohl(one.imm_data) : 0;
    }
  }
  return count;
}

Status VerbsPair::arm() {
  if (int code = ibv_req_notify_cq(completions_, 0))
    return Error::of(code > 0 ? code : EIO, "arming an RDMA queue");
  return ok_status();
}

const char* VerbsPair::fault_name(uint32_t fault) const {
  return adapter_.verbs->wc_status_str(static_cast<ibv_wc_status>(fault));
}

}  // namespace ffs::net::rdma
#endif
