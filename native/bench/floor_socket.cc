// The raw socket: a client asks for blocks of a fixed length, `depth` in flight; a server process
// answers each with an 8-byte head and the block, or with the head alone (floor_message.cc).
#include "bench/floor_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "base/fd.h"
#include "net/socket.h"

namespace ffs::bench {

namespace {

using Ask = FloorAsk;

Status wait_for(int fd, short events) {
  pollfd entry{fd, events, 0};
  while (::poll(&entry, 1, 30000) <= 0) {
    if (errno != EINTR) return Error::of(ETIMEDOUT, "the floor's peer says nothing");
  }
  return ok_status();
}

}  // namespace

Status send_all(int fd, const void* data, size_t length) {
  const auto* at = static_cast<const uint8_t*>(data);
  while (length > 0) {
    const ssize_t sent = ::send(fd, at, length, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) {
      FFS_TRY_STATUS(wait_for(fd, POLLOUT));
      continue;
    }
    if (sent < 0) return Error::of(errno, "sending to the floor's peer");
    at += sent;
    length -= static_cast<size_t>(sent);
  }
  return ok_status();
}

Result<Fd> connect_floor(const FloorOptions& options) {
  const size_t colon = options.path.rfind(':');
  if (colon == std::string::npos) return Error::of(EINVAL, "the socket floor's address is host:port");
  const std::string host = options.path.substr(0, colon);
  const int port = std::atoi(options.path.c_str() + colon + 1);
  if (port <= 0 || port > 65535) return Error::of(EINVAL, "the socket floor's address is host:port");
  FFS_TRY(Fd socket, net::connect_tcp(host.c_str(), static_cast<uint16_t>(port), options.congestion.c_str()));
  FFS_TRY_STATUS(wait_for(socket.get(), POLLOUT));
  FFS_TRY_STATUS(net::connect_result(socket));
  return socket;
}

Status make_blocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) != 0)
    return Error::of(errno, "making a floor's socket wait");
  return ok_status();
}

namespace {

class SocketFloor final : public Floor {
 public:
  explicit SocketFloor(const FloorOptions& options) : options_(options), asks_(options.depth) {
    buffer_.resize(size_t{options.block_bytes} * options.depth);
  }

  Status open() {
    FFS_TRY(socket_, connect_floor(options_));
    return ok_status();
  }

  Result<FloorCount> run(uint32_t duration_ms) override {
    return keep_in_flight(
        options_.depth, duration_ms, [this](uint32_t count) { return ask(count); },
        [this] { return receive(); });
  }

 private:
  Status ask(uint32_t blocks) {
    for (uint32_t i = 0; i < blocks; i++) asks_[i] = {options_.block_bytes, i};
    return send_all(socket_.get(), asks_.data(), blocks * sizeof(Ask));
  }

  // One receive; how many blocks it completed. A block goes straight to its place; the next head
  // comes with the same call.
  Result<uint32_t> receive() {
    iovec pieces[2];
    int piece_count = 0;
    uint8_t* block = buffer_.data() + size_t{slot_} * options_.block_bytes;
    if (head_have_ < sizeof(Ask)) {
      pieces[piece_count++] = {head_ + head_have_, sizeof(Ask) - head_have_};
    }
    pieces[piece_count++] = {block + block_have_, options_.block_bytes - block_have_};
    const ssize_t got = ::readv(socket_.get(), pieces, piece_count);
    if (got < 0 && errno == EAGAIN) {
      FFS_TRY_STATUS(wait_for(socket_.get(), POLLIN));
      return 0u;
    }
    if (got < 0 && errno == EINTR) return 0u;
    if (got <= 0) return Error::of(got == 0 ? EPIPE : errno, "receiving from the floor's peer");
    size_t left = static_cast<size_t>(got);
    const size_t head = std::min(left, sizeof(Ask) - head_have_);
    head_have_ += head;
    left -= head;
    block_have_ += left;
    if (block_have_ < options_.block_bytes) return 0u;
    Ask reply;
    std::memcpy(&reply, head_, sizeof reply);
    if (reply.length != options_.block_bytes)
      return Error::of(EPROTO, "the floor's peer sent another length");
    if (options_.crc) sum_ = sum_ ^ crc32c(block, options_.block_bytes);
    head_have_ = block_have_ = 0;
    slot_ = (slot_ + 1) % options_.depth;
    return 1u;
  }

  FloorOptions options_;
  Fd socket_;
  std::vector<Ask> asks_;
  std::vector<uint8_t> buffer_;
  uint8_t head_[sizeof(Ask)] = {};
  size_t head_have_ = 0;
  size_t block_have_ = 0;
  uint32_t slot_ = 0;
  volatile uint32_t sum_ = 0;
};

// Answers asks of one connection until it closes.
Status serve_connection(int fd) {
  std::vector<uint8_t> block;
  Ask asks[256];
  size_t have = 0;
  while (true) {
    const ssize_t got = ::recv(fd, reinterpret_cast<uint8_t*>(asks) + have, sizeof asks - have, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) {
      pollfd entry{fd, POLLIN, 0};
      ::poll(&entry, 1, -1);
      continue;
    }
    if (got == 0) return ok_status();
    if (got < 0) return Error::of(errno, "receiving the floor's requests");
    have += static_cast<size_t>(got);
    const size_t whole = have / sizeof(Ask);
    // Questions of the message floor: all that came at once are answered at once.
    if (whole > 0 && asks[0].length == 0) {
      FFS_TRY_STATUS(send_all(fd, asks, whole * sizeof(Ask)));
      std::memmove(asks, asks + whole, have - whole * sizeof(Ask));
      have -= whole * sizeof(Ask);
      continue;
    }
    for (size_t i = 0; i < whole; i++) {
      if (asks[i].length > (256u << 20)) return Error::of(EPROTO, "a bad floor request");
      if (block.size() != sizeof(Ask) + asks[i].length) block.assign(sizeof(Ask) + asks[i].length, 7);
      std::memcpy(block.data(), &asks[i], sizeof(Ask));
      FFS_TRY_STATUS(send_all(fd, block.data(), block.size()));
    }
    std::memmove(asks, asks + whole, have - whole * sizeof(Ask));
    have -= whole * sizeof(Ask);
  }
}

}  // namespace

Result<std::unique_ptr<Floor>> open_socket_floor(const FloorOptions& options) {
  auto floor = std::make_unique<SocketFloor>(options);
  FFS_TRY_STATUS(floor->open());
  return std::unique_ptr<Floor>(std::move(floor));
}

Status serve_floor(int listen_fd) {
  while (true) {
    Fd connection(::accept4(listen_fd, nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) {
        pollfd entry{listen_fd, POLLIN, 0};
        ::poll(&entry, 1, -1);
        continue;
      }
      return Error::of(errno, "accepting the floor's client");
    }
    auto status = serve_connection(connection.get());
    if (!status.ok() && status.error().code != EPIPE && status.error().code != ECONNRESET)
      return status.error();
  }
}

}  // namespace ffs::bench
