// The frame reader: any bytes, cut anywhere. It must neither touch memory outside its buffers nor give
// a frame whose parts lie outside; and what it accepts must come out the same when it is cut elsewhere.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/crc32c.h"
#include "fuzz/fuzz.h"
#include "net/frame.h"

using namespace ffs;
using namespace ffs::net;

namespace {

// The input's first byte says how it is cut; what comes after it is the stream.
struct Seen {
  uint64_t frames = 0, payloads = 0;
  uint32_t digest = 0;
  bool bad = false;
};

void see(Seen& seen, const Frame& frame) {
  FFS_CHECK(frame.fixed.size() >= min_fixed_bytes(frame.type) && frame.fixed.size() <= wire::kMaxFixedBytes);
  FFS_CHECK(frame.var.size() <= wire::kMaxVarBytes && frame.payload_bytes <= wire::kMaxPayloadBytes);
  const auto update = frame.as<wire::Update>();
  seen.digest = crc32c_extend(seen.digest, &update, sizeof update);
  seen.digest = crc32c_extend(seen.digest, frame.var.data(), frame.var.size());
  seen.frames++;
}

Seen run(const uint8_t* data, size_t size, size_t step) {
  Seen seen;
  FrameReader reader(8192);
  std::vector<uint8_t> place;
  size_t at = 0;
  while (true) {
    Frame frame;
    switch (reader.next(&frame)) {
      case FrameReader::Next::kBad:
        seen.bad = true;
        return seen;
      case FrameReader::Next::kFrame:
        see(seen, frame);
        if (frame.payload_bytes == 0) continue;
        if (frame.request_id % 3 == 0) {
          reader.discard_payload();
        } else {
          place.assign(frame.payload_bytes, 0);
          reader.place_payload(place.data());
        }
        continue;
      case FrameReader::Next::kPayload:
        seen.payloads++;
        continue;
      case FrameReader::Next::kNeedMore:
        break;
    }
    if (at == size) return seen;
    iovec slots[2];
    const int count = reader.slots(slots);
    FFS_CHECK(count > 0);
    size_t fed = 0;
    for (int i = 0; i < count && fed < step; i++) {
      const size_t piece = std::min({slots[i].iov_len, step - fed, size - at - fed});
      std::memcpy(slots[i].iov_base, data + at + fed, piece);
      fed += piece;
      if (piece < slots[i].iov_len) break;
    }
    FFS_CHECK(fed > 0);
    reader.received(fed);
    at += fed;
  }
}

// Frames with a right checksum reach what lies behind it: repairs those of a stream as far as its
// lengths can be followed.
void repair(std::vector<uint8_t>& bytes) {
  size_t at = 0;
  while (bytes.size() - at >= sizeof(wire::FrameHeader)) {
    wire::FrameHeader header;
    std::memcpy(&header, bytes.data() + at, sizeof header);
    const uint64_t head = sizeof header + uint64_t{header.fixed_bytes} + header.var_bytes;
    if (head > bytes.size() - at) return;
    header.frame_crc = 0;
    std::memcpy(bytes.data() + at, &header, sizeof header);
    header.frame_crc = crc32c(bytes.data() + at, head);
    std::memcpy(bytes.data() + at, &header, sizeof header);
    if (header.payload_bytes > bytes.size() - at - head) return;
    at += head + header.payload_bytes;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::vector<uint8_t> stream(data + 1, data + size);
  if (data[0] % 2 == 1) repair(stream);
  const Seen whole = run(stream.data(), stream.size(), 1u << 20);
  const Seen cut = run(stream.data(), stream.size(), 1 + data[0] % 97);
  FFS_CHECK(whole.frames == cut.frames && whole.payloads == cut.payloads && whole.digest == cut.digest);
  FFS_CHECK(whole.bad == cut.bad);
  return 0;
}

std::vector<std::vector<uint8_t>> fuzz::seeds() {
  std::vector<std::vector<uint8_t>> out;
  for (uint8_t type = 1; type < 40; type++) {
    const uint32_t least = min_fixed_bytes(static_cast<wire::Type>(type));
    if (least == 0) continue;
    SendQueue queue;
    const std::vector<uint8_t> fixed(least, type), var(24, 3), payload(777, 5);
    const bool bulk = may_carry_payload(static_cast<wire::Type>(type));
    queue.push(static_cast<wire::Type>(type), type, fixed, var, bulk ? Bytes(payload) : Bytes());
    queue.push(wire::Type::kPing, 3, wire::StatusReply{});
    std::vector<uint8_t> bytes{type};
    iovec pieces[8];
    int fd;
    const int count = queue.gather(pieces, 8, &fd);
    for (int i = 0; i < count; i++) {
      const auto* from = static_cast<const uint8_t*>(pieces[i].iov_base);
      bytes.insert(bytes.end(), from, from + pieces[i].iov_len);
    }
    out.push_back(bytes);
  }
  return out;
}
