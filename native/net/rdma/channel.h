// Channel: a connection's frames as messages over a Pair, and its bulk data as RDMA WRITE and READ
// (docs/rdma.md). The stream of frames is the one of a socket: FrameReader and SendQueue know no
// difference; a message is a piece of it. What is written before a frame is queued is there before the frame
// is. One thread, but for the destructor. Nothing blocks but the destructor.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/result.h"
#include "net/frame.h"
#include "net/rdma/credits.h"
#include "net/rdma/postings.h"

namespace ffs::net::rdma {

struct Shape {
  uint32_t receives = 32;          // buffers for messages here
  uint32_t message_bytes = 8192;   // of each, and the most that is sent
  uint32_t depth = 128;            // of the send queue
  uint32_t inline_bytes = 0;       // messages up to so many bytes are posted with their bytes
  uint32_t most_bytes = 1u << 30;  // that one work request can move
};

// Since the channel began.
struct ChannelCounters {
  uint64_t doorbells = 0;  // of the send queue
  uint64_t sends = 0;      // messages, those of credits only among them
  uint64_t inline_sends = 0;
  uint64_t credit_sends = 0;  // empty, to tell of credits
  uint64_t writes = 0;
  uint64_t reads = 0;
  uint64_t bulk_bytes = 0;   // written and read
  uint64_t completions = 0;  // of the send queue
  uint64_t receives = 0;     // messages that came
  void add(const ChannelCounters& other);
};

// Memory of the two rings of message buffers: send slots behind receive buffers. The pair's side registers
// it.
uint64_t channel_memory_bytes(const Shape& shape);

class Channel {
 public:
  // `memory` (channel_memory_bytes, under `local_key`) must outlive the channel. All receive buffers of the
  // pair must be posted already; the other has `their_receives`, each of at least their_message_bytes.
  Channel(std::unique_ptr<Pair> pair, const Shape& shape, uint8_t* memory, uint32_t local_key,
          uint32_t their_receives, uint32_t their_message_bytes);
  ~Channel();

  // --- bulk. Goes out with the next flush, before what is queued after it. `token` (not 0) comes back in
  // ended() when the memory isn't used any more; `tag` with it.
  void write(const uint8_t* from, uint32_t local_key, uint64_t to, uint32_t remote_key, uint32_t length,
             uint64_t token, uint64_t tag);
  void read(uint8_t* to, uint32_t local_key, uint64_t from, uint32_t remote_key, uint32_t length,
            uint64_t token, uint64_t tag);

  // --- the stream, as of net::Connection.
  Result<size_t> receive(FrameReader& reader);
  Result<bool> flush(SendQueue& queue, std::vector<uint64_t>* released, size_t most_bytes = SIZE_MAX);

  // Looks at the completions that are there. An error: the pair is broken; culprit() says by what.
  Status poll();
  // Work that has ended since the last call; after a break only what ended well before.
  std::vector<Ended>& ended() { return ended_; }
  // True: a message is there, or the channel is broken: receive() has something to say.
  bool readable() const { return broken_ || first_ != messages_.size(); }
  // Asks for a report of the next completion, and looks once more. True: something is there already.
  Result<bool> arm();
  // The report has come: the next arm() asks anew.
  void disarmed() { armed_ = false; }
  // Bulk work or messages that couldn't be posted wait for completions or credits.
  bool waits() const { return postings_.waits(); }

  bool broken() const { return broken_; }
  // What broke it, if a work request of our own did. token 0: a message, or the other side.
  const Ended& culprit() const { return culprit_; }
  bool by_remote_access() const {
    return remote_access_;
  }  // the other's memory refused it: its keys are wrong
  const char* fault() const { return fault_; }
  // So much has come from the other side.
  bool heard() const { return counters_.receives > 0; }

  // Ends the pair: when it returns no device touches memory for this channel. Blocks (a few system calls);
  // any one thread. Afterwards abandon() gives all tokens that are left.
  void end();
  void abandon(std::vector<Ended>* out);

  const ChannelCounters& counters() const { return counters_; }

 private:
  struct Message {
    uint32_t buffer;
    uint32_t bytes;
    uint32_t taken;
  };
  Status take(const Completion& completion);
  Status ring();
  Status tell_credits();
  Status repost(uint32_t buffer);
  Error breaks(int code, const char* why);
  bool add_message(SendQueue& queue, size_t most_bytes, size_t* taken);

  std::unique_ptr<Pair> pair_;
  Shape shape_;
  uint8_t* memory_;
  uint32_t local_key_;
  uint32_t most_message_bytes_;
  Credits credits_;
  Postings postings_;
  std::vector<Message> messages_;  // received, from first_ on
  size_t first_ = 0;
  std::vector<uint32_t> used_buffers_;  // to be posted anew
  std::vector<int32_t> free_slots_;
  std::vector<int32_t> freed_slots_;
  std::vector<Ended> ended_;
  std::vector<Completion> completions_;
  ChannelCounters counters_;
  Ended culprit_;
  const char* fault_ = nullptr;
  bool remote_access_ = false;
  bool broken_ = false;
  bool armed_ = false;
};

}  // namespace ffs::net::rdma
