// Messages without payload: `depth` questions in flight on a blocking socket, each answered by its head. What
// any request costs that finds its data in place; with one in flight, two processes that wake each other.
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "base/fd.h"
#include "bench/floor.h"
#include "bench/floor_socket.h"

namespace ffs::bench {

namespace {

class MessageFloor final : public Floor {
 public:
  explicit MessageFloor(const FloorOptions& options) : options_(options), asks_(options.depth) {}

  Status open() {
    if (options_.crc) FFS_TRY_STATUS(memory_.allocate(size_t{options_.depth} * options_.block_bytes));
    if (options_.path.empty() || options_.path[0] != '/') {
      FFS_TRY(socket_, connect_floor(options_));
      return make_blocking(socket_.get());
    }
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (options_.path.size() >= sizeof address.sun_path)
      return Error::of(EINVAL, "the message floor's path is too long for a Unix socket");
    std::memcpy(address.sun_path, options_.path.data(), options_.path.size());
    socket_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket_.valid()) return Error::of(errno, "a socket of the message floor");
    if (::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
      return Error::of(errno, "connecting to the message floor's peer");
    return ok_status();
  }

  Result<FloorCount> run(uint32_t duration_ms) override {
    return keep_in_flight(
        options_.depth, duration_ms, [this](uint32_t count) { return ask(count); },
        [this] { return receive(); });
  }

 private:
  Status ask(uint32_t count) {
    for (uint32_t i = 0; i < count; i++) asks_[i] = {0, i};
    return send_all(socket_.get(), asks_.data(), count * sizeof(FloorAsk));
  }

  Result<uint32_t> receive() {
    uint8_t heads[256 * sizeof(FloorAsk)];
    const ssize_t got = ::recv(socket_.get(), heads, sizeof heads, 0);
    if (got < 0 && errno == EINTR) return 0u;
    if (got <= 0) return Error::of(got == 0 ? EPIPE : errno, "receiving from the message floor's peer");
    have_ += static_cast<size_t>(got);
    const auto whole = static_cast<uint32_t>(have_ / sizeof(FloorAsk));
    have_ %= sizeof(FloorAsk);
    if (options_.crc) {
      for (uint32_t i = 0; i < whole; i++) {
        sum_ = sum_ ^ crc32c(memory_.data() + size_t{slot_} * options_.block_bytes, options_.block_bytes);
        slot_ = (slot_ + 1) % options_.depth;
      }
    }
    return whole;
  }

  FloorOptions options_;
  Fd socket_;
  std::vector<FloorAsk> asks_;
  BlockMemory memory_;
  size_t have_ = 0;
  uint32_t slot_ = 0;
  volatile uint32_t sum_ = 0;  // so that the checksum can't be optimised away
};

}  // namespace

Result<std::unique_ptr<Floor>> open_message_floor(const FloorOptions& options) {
  auto floor = std::make_unique<MessageFloor>(options);
  FFS_TRY_STATUS(floor->open());
  return std::unique_ptr<Floor>(std::move(floor));
}

}  // namespace ffs::bench
