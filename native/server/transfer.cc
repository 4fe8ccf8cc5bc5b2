// Bytes on their way: payloads fetched from client memory, reads into client memory or the pool.
#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/guarded.h"
#include "server/shard.h"
#include "server/wire_craq.h"

namespace ffs::server {

using craq::Outcome;

namespace {

constexpr uint32_t kFetchBudgetBytes = 2u << 20;  // a pass: about 0.3 ms of copying
constexpr uint32_t kBlock = io::kBlockBytes;

uint32_t piece_length(uint32_t chunk_offset, uint32_t left) {
  return std::min(left, kGranuleBytes - chunk_offset % kGranuleBytes);
}

}  // namespace

// --- payloads -------------------------------------------------------------------------------------

Payload* Shard::take_payload(uint32_t chunk_offset, uint32_t length) {
  Payload* payload = payloads_.take();
  payload->references = 1;
  payload->buffer = nullptr;
  payload->berth = engine::Berth{};
  payload->creates = false;
  payload->sound = true;
  payload->checked = payload->pieces_checked = 0;
  payload->pad = chunk_offset % kBlock;
  payload->chunk_offset = chunk_offset;
  payload->length = length;
  payload->has_crcs = false;
  payload->crc_count = 0;
  payload->by_block = payload->pad == 0 && length <= kMaxKnownBlocks * kCrcBlockBytes;
  payload->has_block_crcs = false;
  payload->region = nullptr;
  payload->source = nullptr;
  payload->holder = nullptr;
  payload->target = nullptr;
  payload->fetch = 0;
  payload->fetched = 0;
  return payload;
}

void Shard::release(Payload* payload) {
  FFS_CHECK(payload->references > 0);
  if (--payload->references > 0) return;
  FFS_CHECK(!payload->waiter.waiting);
  if (payload->buffer != nullptr) buffers_->release(payload->buffer);
  if (payload->berth.bytes != nullptr) store_->give_back(&payload->berth);
  drop_source(payload);
  payload->buffer = nullptr;
  payloads_.give(payload);
}

// The tail of the last block is zeroed, so that the store can write whole blocks without a copy.
void Shard::set_buffer(Payload* payload, uint8_t* buffer) {
  payload->buffer = buffer;
  const uint32_t end = payload->pad + payload->length;
  std::memset(buffer + end, 0, (kBlock - end % kBlock) % kBlock);
}

// A slot of the device's memory instead of a buffer: for a new chunk that nobody forwards. The end of its
// last block is zeros, as of a buffer.
bool Shard::take_berth(Payload* payload, const Target& target) {
  if (!payload->creates || !lending_ || target.recorded.member_count != 1) return false;
  if (!store_->take_berth(payload->length, &payload->berth)) return false;
  uint8_t* end = payload->data() + payload->length;
  const uint32_t rest = (kBlock - payload->length % kBlock) % kBlock;
  if (rest == 0 || touch([&] { std::memset(end, 0, rest); })) return true;
  lose_berth(payload);
  return false;
}

// Its memory can't be had.
void Shard::lose_berth(Payload* payload) {
  store_->give_back(&payload->berth);
  stop_lending(EFAULT);
}

// Goes on with the pieces of which the first `arrived` bytes hold all, while they are in the cache.
void Shard::check_some(Payload* payload, uint32_t arrived) {
  const auto pieces = [&] {
    while (payload->sound && payload->checked < arrived) {
      const uint32_t at = payload->checked;
      const uint32_t length = piece_length(payload->chunk_offset + at, payload->length - at);
      if (at + length > arrived) return;
      const uint8_t* bytes = payload->data() + at;
      const uint32_t crc = payload->by_block
                               ? crc32c_blocks(bytes, length, payload->block_crcs.data() + at / kBlock)
                               : crc32c(bytes, length);
      uint32_t& known = payload->crcs[payload->pieces_checked++];
      if (!payload->has_crcs) known = crc;
      payload->sound = known == crc;
      payload->checked = at + length;
    }
  };
  if (payload->berth.bytes == nullptr) return pieces();
  if (touch(pieces)) return;
  payload->sound = false;
  stop_lending(EFAULT);
}

bool Shard::check_payload(Payload* payload) {
  check_some(payload, payload->length);
  if (!payload->sound) {
    metrics_.crc_failures++;
    return false;
  }
  payload->has_block_crcs = payload->by_block;
  return true;
}

// --- fetching from client memory ------------------------------------------------------------------

void Shard::start_fetch(Payload* payload) {
  FFS_CHECK((payload->region != nullptr || payload->source != nullptr) && !payload->has_place());
  add_reference(payload);
  if (payload->source == nullptr && take_berth(payload, *payload->target)) return list_fetch(payload);
  payload->waiter.ready = on_fetch_buffer;
  payload->waiter.owner = payload;
  uint8_t* buffer =
      buffers_->allocate_or_wait(BufferUse::kUpdate, payload->pad + payload->length, &payload->waiter);
  if (buffer != nullptr) on_fetch_buffer(&payload->waiter, buffer);
}

void Shard::on_fetch_buffer(BufferWaiter* waiter, uint8_t* buffer) {
  Payload* payload = static_cast<Payload*>(waiter->owner);
  Shard* self = payload->target->shard;
  self->set_buffer(payload, buffer);
  if (payload->source != nullptr) return self->read_over_rdma(payload);
  self->list_fetch(payload);
}

void Shard::list_fetch(Payload* payload) {
  payload->next_fetch = nullptr;
  (fetch_tail_ != nullptr ? fetch_tail_->next_fetch : fetch_head_) = payload;
  fetch_tail_ = payload;
}

void Shard::run_fetches() {
  uint32_t budget = kFetchBudgetBytes;
  while (fetch_head_ != nullptr && budget > 0) {
    Payload* payload = fetch_head_;
    const bool good = copy_some(payload, &budget);
    if (good && payload->fetched < payload->length) return;
    fetch_head_ = payload->next_fetch;
    if (fetch_head_ == nullptr) fetch_tail_ = nullptr;
    end_fetch(payload, good ? Outcome::ok : Outcome::bad_checksum);
  }
}

// Copies whole pieces with their checksums in the same pass. False: a piece doesn't match.
bool Shard::copy_some(Payload* payload, uint32_t* budget) {
  const uint8_t* from = payload->region->readable(payload->address);
  uint32_t piece = net::piece_count(payload->chunk_offset, payload->fetched);
  while (payload->fetched<payload->length&& * budget> 0) {
    const uint32_t at = payload->fetched;
    const uint32_t length = piece_length(payload->chunk_offset + at, payload->length - at);
    uint8_t* to = payload->data() + at;
    uint32_t* blocks = payload->by_block ? payload->block_crcs.data() + at / kBlock : nullptr;
    uint32_t crc = 0;
    bool got = true;
    const auto copy = [&] {
      if (from != nullptr) {
        crc = payload->by_block ? crc32c_copy_blocks(to, from + at, length, blocks)
                                : crc32c_copy(to, from + at, length);
        return;
      }
      const off_t offset = static_cast<off_t>(payload->region->offset + payload->address + at);
      got = ::pread(payload->region->fd.get(), to, length, offset) == static_cast<ssize_t>(length);
      if (got) crc = payload->by_block ? crc32c_blocks(to, length, blocks) : crc32c(to, length);
    };
    if (payload->berth.bytes == nullptr) {
      copy();
    } else if (!touch(copy)) {
      stop_lending(EFAULT);
      return false;
    }
    if (!got) return false;
    if (!payload->has_crcs) payload->crcs[piece] = crc;
    if (payload->crcs[piece] != crc) {
      metrics_.crc_failures++;
      return false;
    }
    metrics_.bytes_copied += length;
    payload->fetched += length;
    *budget -= std::min(*budget, length);
    piece++;
  }
  payload->has_block_crcs = payload->by_block && payload->fetched == payload->length;
  return true;
}

void Shard::end_fetch(Payload* payload, Outcome outcome) {
  drop_source(payload);
  Target* target = payload->target;
  const craq::OpId op = payload->fetch;
  complete(*target, op, outcome);
  release(payload);
}

// --- reads ----------------------------------------------------------------------------------------

// Straight into the client's pages where they are registered, else out of the device's memory or into a pool
// buffer. A read that was overtaken by a change of its chain begins anew.
void Shard::start_read(Request* request) {
  drop_data(request);
  request->read_done = false;
  request->patch_failed = false;
  engine::ReadOp& read = request->read;
  if (request->region == nullptr || read.length == 0) return read_inline(request);
  read.memory = request->region->mapping.data() + request->bulk.address;
  read.region = request->region->registered;
  read.sink = request;
  reads_under_way_++;
  store_->read(&read);
}

void Shard::read_inline(Request* request) {
  engine::ReadOp& read = request->read;
  read.sink = nullptr;
  read.region = io::Region{};
  read.memory = nullptr;
  if (read.length == 0) {
    static uint8_t nothing[1];
    read.memory = nothing;
    reads_under_way_++;
    store_->read(&read);
    return;
  }
  if (lend(request)) return;
  request->waiter.ready = on_read_buffer;
  request->waiter.owner = request;
  const uint32_t pad = read.offset % kBlock;
  uint8_t* buffer = buffers_->allocate_or_wait(BufferUse::kRead, pad + read.length, &request->waiter);
  if (buffer != nullptr) on_read_buffer(&request->waiter, buffer);
}

void Shard::on_read_buffer(BufferWaiter* waiter, uint8_t* buffer) {
  Request* request = static_cast<Request*>(waiter->owner);
  Shard* self = request->shard;
  engine::ReadOp& read = request->read;
  request->buffer = buffer;
  read.memory = buffer + read.offset % kBlock;
  read.region = self->buffers_->region_of(buffer);
  self->reads_under_way_++;
  self->store_->read(&read);
}

// What the device can't put in place travels in the reply instead.
int Request::put(uint32_t at, const uint8_t* bytes, uint32_t size) {
  if (size == 0) return 0;
  Patch* last = patches.empty() ? nullptr : &patches.back();
  if (last != nullptr && last->at + last->length == at && last->capacity - last->length >= size) {
    std::memcpy(last->buffer + last->length, bytes, size);
    last->length += size;
  } else {
    Patch patch;
    patch.buffer = shard->buffers_->try_allocate(BufferUse::kRead, size);
    if (patch.buffer == nullptr) {
      patch_failed = true;
      return ENOBUFS;
    }
    patch.at = at;
    patch.length = size;
    patch.capacity = static_cast<uint32_t>(io::BufferPool::rounded(size));
    std::memcpy(patch.buffer, bytes, size);
    patches.push_back(patch);
  }
  shard->metrics_.bytes_copied += size;
  return 0;
}

void Shard::on_read_done(engine::StoreOp* op) {
  Request* request = static_cast<Request*>(op->owner);
  Shard* self = request->shard;
  self->reads_under_way_--;
  if (op->error != 0 && request->patch_failed) {
    // No memory for the patches just then: once more, by the way that can wait for it.
    for (Patch& patch : request->patches) self->buffers_->release(patch.buffer);
    request->patches.clear();
    request->patch_failed = false;
    self->unuse_region(*request->session, request->region);
    request->region = nullptr;
    self->read_inline(request);
    return;
  }
  request->read_done = op->error == 0;
  Outcome outcome = Outcome::ok;
  if (op->error == EBADMSG)
    outcome = Outcome::corrupt;
  else if (op->error != 0)
    outcome = Outcome::io_error;
  self->complete(*request->target, request->read_op, outcome);
}

// Gives back the bytes that a request has read.
void Shard::drop_data(Request* request) {
  if (request->buffer != nullptr) buffers_->release(request->buffer);
  request->buffer = nullptr;
  if (request->lent != nullptr) release(std::exchange(request->lent, nullptr));
  for (Patch& patch : request->patches) buffers_->release(patch.buffer);
  request->patches.clear();
}

// Gives back what a request holds for its read.
void Shard::drop_read(Request* request) {
  buffers_->cancel(&request->waiter);
  drop_data(request);
  if (request->region != nullptr) unuse_region(*request->session, request->region);
  request->region = nullptr;
  request->read_done = false;
  request->read_op = 0;
}

}  // namespace ffs::server
