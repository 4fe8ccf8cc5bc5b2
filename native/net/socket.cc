#include "net/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstdio>
#include <cstring>
#include <string_view>

namespace ffs::net {

namespace {

constexpr size_t kMaxWaitingDescriptors = 64;
constexpr int kMaxDescriptorsAMessage = 8;
constexpr int kGatherPieces = 64;
constexpr int kBacklog = 1024;

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Result<Address> tcp_address(const char* host, uint16_t port) {
  Address address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  if (::inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.length = sizeof *v4;
    return address;
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (::inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.length = sizeof *v6;
    return address;
  }
  return Error::of(EINVAL, "the host must be a numeric IPv4 or IPv6 address");
}

Result<Address> local_address(const char* path) {
  Address address;
  auto* local = reinterpret_cast<sockaddr_un*>(&address.storage);
  const size_t length = std::strlen(path);
  if (length == 0 || length >= sizeof local->sun_path) {
    return Error::of(ENAMETOOLONG, "the path of a Unix socket must have 1 to 107 bytes");
  }
  local->sun_family = AF_UNIX;
  std::memcpy(local->sun_path, path, length + 1);
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length + 1);
  return address;
}

// A name that ends in ? is a wish (docs/ring.md, Connections).
Status set_congestion(int fd, std::string_view name) {
  const bool wish = name.ends_with('?');
  if (wish) name.remove_suffix(1);
  if (name.empty()) return ok_status();
  const auto length = static_cast<socklen_t>(name.size());
  if (::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), length) == 0) return ok_status();
  if (wish && (errno == ENOENT || errno == EPERM)) return ok_status();
  return Error::of(errno,
                   "the kernel lacks the TCP congestion control that was asked for, or doesn't allow it");
}

Status tune_tcp(int fd, const char* congestion) {
  const int on = 1;
  if (::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) return Error::of(errno, "TCP_NODELAY");
  return set_congestion(fd, congestion != nullptr ? congestion : "");
}

Result<Fd> stream_socket(int family) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return Error::of(errno, "socket");
  return fd;
}

// Removes a socket file that nobody listens on any more.
Status remove_stale_socket(const char* path, const Address& address) {
  struct stat info;
  if (::lstat(path, &info) != 0)
    return errno == ENOENT ? ok_status() : Status(Error::of(errno, "socket path"));
  if (!S_ISSOCK(info.st_mode)) return Error::of(EEXIST, "the socket path exists and is no socket");
  FFS_TRY(Fd probe, stream_socket(AF_UNIX));
  if (::connect(probe.get(), address.get(), address.length) == 0 || errno == EAGAIN) {
    return Error::of(EADDRINUSE, "another process listens on the socket path");
  }
  if (errno != ECONNREFUSED) return Error::of(errno, "socket path");
  if (::unlink(path) != 0 && errno != ENOENT) return Error::of(errno, "removing a dead socket file");
  return ok_status();
}

}  // namespace

Result<Fd> listen_tcp(const char* host, uint16_t port, const char* congestion) {
  FFS_TRY(Address address, tcp_address(host, port));
  FFS_TRY(Fd fd, stream_socket(address.get()->sa_family));
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  FFS_TRY_STATUS(tune_tcp(fd.get(), congestion));  // accepted sockets inherit both
  if (::bind(fd.get(), address.get(), address.length) != 0) return Error::of(errno, "binding the TCP port");
  if (::listen(fd.get(), kBacklog) != 0) return Error::of(errno, "listening on the TCP port");
  return fd;
}

Result<uint16_t> bound_port(const Fd& listener) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
    return Error::of(errno, "getsockname");
  }
  const uint16_t port = storage.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port
                                                      : reinterpret_cast<sockaddr_in*>(&storage)->sin_port;
  return static_cast<uint16_t>(ntohs(port));
}

Result<Fd> listen_local(const char* path) {
  FFS_TRY(Address address, local_address(path));
  FFS_TRY_STATUS(remove_stale_socket(path, address));
  FFS_TRY(Fd fd, stream_socket(AF_UNIX));
  if (::bind(fd.get(), address.get(), address.length) != 0)
    return Error::of(errno, "binding the Unix socket");
  if (::listen(fd.get(), kBacklog) != 0) return Error::of(errno, "listening on the Unix socket");
  return fd;
}

Result<Fd> accept_connection(const Fd& listener, Transport transport) {
  Fd fd(::accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd.valid()) return Error::of(errno == EWOULDBLOCK ? EAGAIN : errno, "accept");
  if (transport == Transport::kTcp) FFS_TRY_STATUS(tune_tcp(fd.get(), nullptr));
  return fd;
}

Result<Fd> connect_tcp(const char* host, uint16_t port, const char* congestion) {
  FFS_TRY(Address address, tcp_address(host, port));
  FFS_TRY(Fd fd, stream_socket(address.get()->sa_family));
  FFS_TRY_STATUS(tune_tcp(fd.get(), congestion));
  if (::connect(fd.get(), address.get(), address.length) != 0 && errno != EINPROGRESS) {
    return Error::of(errno, "connecting over TCP");
  }
  return fd;
}

Result<Fd> connect_local(const char* path) {
  FFS_TRY(Address address, local_address(path));
  FFS_TRY(Fd fd, stream_socket(AF_UNIX));
  if (::connect(fd.get(), address.get(), address.length) != 0) {
    return Error::of(errno, "connecting to the Unix socket");
  }
  return fd;
}

Status connect_result(const Fd& socket) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0)
    return Error::of(errno, "connect");
  if (error != 0) return Error::of(error, "connect");
  return ok_status();
}

Result<std::string> host_id() {
  char boot[64] = {};
  Fd fd(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return Error::of(errno, "reading /proc/sys/kernel/random/boot_id");
  const ssize_t length = ::read(fd.get(), boot, sizeof boot - 1);
  if (length <= 0) return Error::of(EIO, "reading /proc/sys/kernel/random/boot_id");
  boot[std::strcspn(boot, "\n")] = '\0';
  struct stat net_namespace;
  if (::stat("/proc/self/ns/net", &net_namespace) != 0) return Error::of(errno, "stat of /proc/self/ns/net");
  return std::string(boot) + ":" + std::to_string(net_namespace.st_ino);
}

// --- Connection -------------------------------------------------------------------------------

Result<size_t> Connection::receive() {
  if (channel != nullptr) return channel->receive(reader);
  iovec pieces[2];
  const int count = reader.slots(pieces);
  if (count == 0) return Error::of(EBUSY, "the reader has no room");
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = static_cast<size_t>(count);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptorsAMessage)];
  if (transport == Transport::kLocal) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
  ssize_t got;
  do {
    got = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return Error::of(errno == EWOULDBLOCK ? EAGAIN : errno, "receiving");
  if (transport == Transport::kLocal) {
    for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
      if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
      const size_t descriptor_count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < descriptor_count; i++) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
        descriptors.emplace_back(fd);
      }
    }
    if ((message.msg_flags & MSG_CTRUNC) != 0 || descriptors.size() > kMaxWaitingDescriptors) {
      return Error::of(EPROTO, "too many descriptors in one message");
    }
  }
  if (got == 0) return Error::of(EPIPE, "the peer has closed the connection");
  size_t asked = 0;
  for (int i = 0; i < count; i++) asked += pieces[i].iov_len;
  // A message that carries descriptors ends a receive early.
  drained = static_cast<size_t>(got) < asked && message.msg_controllen == 0;
  reader.received(static_cast<size_t>(got));
  return static_cast<size_t>(got);
}

namespace {

// Cuts a gather of `count` pieces at most_bytes; the number of pieces that are left.
int cut(iovec* pieces, int count, size_t most_bytes) {
  for (int i = 0; i < count; i++) {
    if (pieces[i].iov_len >= most_bytes) {
      pieces[i].iov_len = most_bytes;
      return i + 1;
    }
    most_bytes -= pieces[i].iov_len;
  }
  return count;
}

}  // namespace

Result<size_t> Connection::receive_beside(FrameReader& from_socket) {
  iovec pieces[2];
  const int count = from_socket.slots(pieces);
  if (count == 0) return Error::of(EBUSY, "the reader has no room");
  ssize_t got;
  do {
    got = ::readv(socket.get(), pieces, count);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return Error::of(errno == EWOULDBLOCK ? EAGAIN : errno, "receiving");
  if (got == 0) return Error::of(EPIPE, "the peer has closed the connection");
  from_socket.received(static_cast<size_t>(got));
  return static_cast<size_t>(got);
}

Result<bool> Connection::flush(std::vector<uint64_t>* released, size_t most_bytes) {
  full = false;
  if (channel != nullptr) return channel->flush(queue, released, most_bytes);
  while (!queue.empty()) {
    if (most_bytes == 0) return false;
    auto sent = send_once(most_bytes, released);
    if (!sent.ok()) {
      full = sent.error().code == EAGAIN;
      if (full) return false;
      return sent.error();
    }
    most_bytes -= *sent;
  }
  return true;
}

// One sendmsg. Large payloads go without a copy where that is on, and then not beside what is copied: the
// kernel reads all of such a message's memory later, heads of frames too.
Result<size_t> Connection::send_once(size_t most_bytes, std::vector<uint64_t>* released) {
  iovec pieces[kGatherPieces];
  int descriptor = -1;
  msghdr message{};
  message.msg_iov = pieces;
  const bool apart = zero_copy.on() || zero_copy.outstanding();
  const bool large = apart && queue.large_comes(ZeroCopy::kLeastBytes);
  bool before_large = false;
  const int count =
      apart ? queue.gather_alike(pieces, kGatherPieces, &descriptor, ZeroCopy::kLeastBytes, &before_large)
            : queue.gather(pieces, kGatherPieces, &descriptor);
  const int kept = cut(pieces, count, most_bytes);
  message.msg_iovlen = static_cast<size_t>(kept);
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &descriptor, sizeof(int));
  }
  // A head shouldn't be a packet of its own where its payload follows in the next call.
  int flags = MSG_NOSIGNAL | (before_large && kept == count ? MSG_MORE : 0);
  if (large && zero_copy.on()) flags |= MSG_ZEROCOPY;
  ssize_t sent;
  do {
    sent = ::sendmsg(socket.get(), &message, flags);
    // Too much is pinned or unreported already: this goes as a copy.
    if (sent < 0 && errno == ENOBUFS && (flags & MSG_ZEROCOPY) != 0) {
      flags &= ~MSG_ZEROCOPY;
      errno = EINTR;
    }
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return Error::of(errno == EWOULDBLOCK ? EAGAIN : errno, "sending");
  if ((flags & MSG_ZEROCOPY) != 0) zero_copy.sent();
  // A large payload's memory is free when all of its parts are, and none of them may have gone last.
  const size_t before = released->size();
  queue.advance(static_cast<size_t>(sent), released);
  if (large && zero_copy.outstanding()) {
    for (size_t i = before; i < released->size(); i++) zero_copy.hold((*released)[i]);
    released->resize(before);
  }
  return static_cast<size_t>(sent);
}

void Connection::abandon(std::vector<uint64_t>* released) {
  const bool waits = zero_copy.outstanding();
  const bool part_sent = waits && queue.large_comes(ZeroCopy::kLeastBytes);
  const size_t before = released->size();
  queue.clear(released);
  if (part_sent) {
    zero_copy.hold((*released)[before]);
    released->erase(released->begin() + static_cast<ptrdiff_t>(before));
  }
  if (!waits) return;
  // What TCP would still send, or send again, is dropped, and reported as done with.
  sockaddr none{};
  none.sa_family = AF_UNSPEC;
  (void)::connect(socket.get(), &none, sizeof none);
}

}  // namespace ffs::net
