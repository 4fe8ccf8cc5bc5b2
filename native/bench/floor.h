// Floors: the least that a benchmark's case must cost on this machine, as own minimal loops - a raw
// device through io_uring and O_DIRECT, a socket, a memory copy. ffs is measured as a ratio to
// them (docs/ring.md, Floors). A floor belongs to the thread that made it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

namespace ffs::bench {

enum class FloorOp : uint32_t { kRead = 0, kWrite = 1, kSocket = 2, kCopy = 3, kMessage = 4 };

struct FloorOptions {
  FloorOp op = FloorOp::kRead;
  std::string path;           // device file; host:port of kSocket; of kMessage that, or a Unix socket's path
  uint64_t region_bytes = 0;  // of the device, from region_offset on
  uint64_t region_offset = 0;
  uint32_t block_bytes = 0;
  uint32_t depth = 1;        // blocks in flight
  bool random = false;       // else sequential, from where the last run ended
  bool crc = false;          // CRC32C over every block, as a client would
  uint32_t fsync_every = 0;  // writes: an fdatasync after so many blocks
  std::string congestion;    // TCP; "" leaves the system's
};

struct FloorCount {
  uint64_t blocks = 0;
  uint64_t elapsed_ns = 0;
};

class Floor {
 public:
  virtual ~Floor() = default;
  // Keeps `depth` blocks in flight for about duration_ms, then waits for the last. Blocking.
  virtual Result<FloorCount> run(uint32_t duration_ms) = 0;
};

// Setup: opens, allocates, registers, connects. EINVAL names what doesn't fit.
Result<std::unique_ptr<Floor>> open_floor(const FloorOptions& options);

// The peer of kSocket and kMessage: serves every connection to `listen_fd` (borrowed) one after another,
// until accept fails. Blocking.
Status serve_floor(int listen_fd);

Result<std::unique_ptr<Floor>> open_device_floor(const FloorOptions& options);
Result<std::unique_ptr<Floor>> open_socket_floor(const FloorOptions& options);
Result<std::unique_ptr<Floor>> open_message_floor(const FloorOptions& options);
Result<std::unique_ptr<Floor>> open_copy_floor(const FloorOptions& options);

uint64_t now_ns();  // CLOCK_MONOTONIC

// Memory for the blocks of a benchmark, resident, with bytes that don't compress. In huge pages where the
// kernel gives them: how scattered small ones happen to lie would make one contestant's requests
// longer than another's.
class BlockMemory {
 public:
  BlockMemory() = default;
  ~BlockMemory() { reset(); }
  BlockMemory(const BlockMemory&) = delete;
  Status allocate(size_t bytes);
  void reset();
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ffs::bench
