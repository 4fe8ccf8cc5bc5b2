// A chunk store without a server, for the local tier of a KV cache (docs/kv_tiers.md, Local store): blocks by
// a key of 16 bytes and a tag of 16 more, in one file or device of its own.
//
// Threads: the store has a thread of its own, which owns its Io. All functions may be called by any thread,
// and several at once; they block until it has done what they ask. Of batches that wait, those that read go
// first. What a batch reads is verified against its checksums in the caller's thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/result.h"
#include "engine/chunk_store.h"
#include "io/io.h"

namespace ffs::engine {

enum class LocalOp : uint32_t { read = 1, put = 2, remove = 3, exists = 4 };

// One block of a batch. `memory` is best aligned to 4096: then its bytes aren't copied.
struct LocalEntry {
  std::array<uint8_t, 16> key{};
  std::array<uint8_t, 16> tag{};
  uint8_t* memory = nullptr;
  LocalOp op = LocalOp::read;
  uint32_t length = 0;  // read: room; put: bytes, 1 to 16 MiB
  // Out. read, exists: the block's length; put: what it has stored. -ENOENT: no such block (another tag too);
  // -EMSGSIZE: it doesn't fit; -EBADMSG: damaged; -ENOSPC: full; -EBUSY: the same block is being put already.
  int32_t result = 0;
};

struct LocalOptions {
  std::string path;  // of a file that is made if it isn't there, or of a device or file that was one before
  std::string backend;      // "", "auto", "uring", "pread"
  uint64_t size_bytes = 0;  // of a new one
  uint64_t max_chunks = 0;  // of a new one; 0: size / 256 KiB
  bool fresh = false;       // forget what it holds
  bool sparse = false;      // a new file takes its room as it is written
};

struct LocalListed {
  std::array<uint8_t, 16> key{};
  std::array<uint8_t, 16> tag{};
  uint32_t length = 0;
};

struct LocalFigures {
  Capacity capacity;
  StoreMetrics metrics;
  uint32_t most_in_flight = 0;
  bool uring = false;
};

class LocalStore {
 public:
  // Errors: those of ChunkStore::format and open; EXDEV: it belongs to a cluster.
  // `why`, if not null: a sentence on what went wrong.
  static Result<std::unique_ptr<LocalStore>> open(const LocalOptions& options, std::string* why = nullptr);
  // Writes a snapshot and ends the thread. No call may be under way.
  ~LocalStore();
  LocalStore(const LocalStore&) = delete;
  LocalStore& operator=(const LocalStore&) = delete;

  // All of the entries, at most `depth` of them in flight (0: as many as there are operations). Each has its
  // result. A put is durable.
  void run(std::span<LocalEntry> entries, uint32_t depth);
  // Blocks in the order of their keys, those after `after` (null: from the first); how many.
  size_t list(const std::array<uint8_t, 16>* after, std::span<LocalListed> out);
  LocalFigures figures();

 private:
  struct Batch;
  struct Slot;
  struct Call;
  LocalStore() = default;

  static Status bring_up(LocalStore* self, const LocalOptions& options);
  void serve(const LocalOptions& options, std::condition_variable* up, Status* status, bool* is_up,
             std::string* why);
  void take_in();
  void start(Slot* slot, Batch* batch, uint32_t at);
  void start_put(Slot* slot, const LocalEntry& entry, const ChunkKey& key, const uint32_t* sums);
  void ended(Slot* slot, StoreOp* op);
  void finish(Batch* batch, LocalEntry* entry, int32_t result);
  void call(Call* call);

  std::thread thread_;
  std::unique_ptr<io::Io> io_;  // the thread's, but for wake()
  std::unique_ptr<ChunkStore> store_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Slot*> free_;
  std::deque<Batch*> reading_, writing_;  // that have entries to start
  uint32_t in_flight_ = 0, most_in_flight_ = 0;

  std::mutex mutex_;
  std::deque<Batch*> arrived_;  // below: under the mutex
  std::deque<Call*> calls_;
  bool stop_ = false;
};

}  // namespace ffs::engine
