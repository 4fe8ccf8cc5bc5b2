// Non-blocking stream sockets for the two transports: `tcp` and `local` (Unix stream sockets
// that also carry descriptors). Nothing here blocks; readiness is the owner's business (io_uring
// polls on a server, poll(2) in a client's ring).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"
#include "net/frame.h"
#include "net/rdma/channel.h"
#include "net/zero_copy.h"

namespace ffs::net {

enum class Transport : uint8_t { kTcp = 1, kLocal = 2 };

// host: a numeric IPv4 or IPv6 address. Port 0 binds any. congestion: null or "" leaves the
// system's; one that the kernel lacks is ENOENT, one that it doesn't allow this user EPERM. If its name ends
// in ?, the system's stays instead.
Result<Fd> listen_tcp(const char* host, uint16_t port, const char* congestion);
Result<uint16_t> bound_port(const Fd& listener);
// Replaces a dead socket file at `path`; EADDRINUSE when somebody listens there, ENAMETOOLONG
// above 107 bytes.
Result<Fd> listen_local(const char* path);
// EAGAIN: nobody waits.
Result<Fd> accept_connection(const Fd& listener, Transport transport);

// A non-blocking connect: the socket is writable when it is through, then connect_result() says
// how it went. ENOENT / ECONNREFUSED at once for a Unix socket without a listener; EAGAIN when its
// backlog is full.
Result<Fd> connect_tcp(const char* host, uint16_t port, const char* congestion);
Result<Fd> connect_local(const char* path);
Status connect_result(const Fd& socket);

// Boot id and network namespace: processes with equal strings can use `local`.
Result<std::string> host_id();

// One connection: socket, reader, send queue and received descriptors. With a channel its frames go over
// RDMA, and the socket is there to tell of the other's end (docs/rdma.md).
struct Connection {
  Fd socket;
  std::unique_ptr<rdma::Channel> channel;
  Transport transport = Transport::kTcp;
  FrameReader reader;
  SendQueue queue;
  ZeroCopy zero_copy;          // off until it is started
  std::deque<Fd> descriptors;  // received, in the order of the frames that they came with
  // The last receive() got less than it had room for, so the socket was empty: an edge-triggered
  // owner needn't ask again before it is told of more (unless the peer has hung up).
  bool drained = false;
  bool full = false;  // the last flush() ended because the socket took no more

  Connection() = default;
  Connection(Fd fd, Transport kind) : socket(std::move(fd)), transport(kind) {}

  // One recvmsg. The number of bytes; EAGAIN: nothing there; EPIPE: the peer has closed;
  // EBUSY: the reader has no room (go on with next()); EPROTO: too many descriptors; else the
  // socket's error.
  Result<size_t> receive();
  // sendmsg until the queue is empty, the socket is full, or most_bytes are sent. True: all is sent.
  // `released` gets the tokens of payloads that are through and whose memory the kernel doesn't read any
  // more.
  Result<bool> flush(std::vector<uint64_t>* released, size_t most_bytes = SIZE_MAX);
  // The error queue was reported: *released gets the tokens of payloads that the kernel is done with now.
  // False: there is more to it than that.
  bool collect_sent(std::vector<uint64_t>* released) { return zero_copy.collect(socket.get(), released); }
  // Drops what is queued. Of what the kernel still reads, collect_sent() gets the tokens; so that this isn't
  // for long the connection is reset, if there is such.
  void abandon(std::vector<uint64_t>* released);
  // One recv of the socket beside a channel, as receive().
  Result<size_t> receive_beside(FrameReader& from_socket);

 private:
  Result<size_t> send_once(size_t most_bytes, std::vector<uint64_t>* released);
};

}  // namespace ffs::net
