#include "net/zero_copy.h"

#include <linux/errqueue.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace ffs::net {

namespace {

// Both ends of a connection within a host have one address, but for what address translation does.
bool same_address(int socket) {
  sockaddr_storage mine{}, theirs{};
  socklen_t mine_bytes = sizeof mine, theirs_bytes = sizeof theirs;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&mine), &mine_bytes) != 0 ||
      ::getpeername(socket, reinterpret_cast<sockaddr*>(&theirs), &theirs_bytes) != 0 ||
      mine.ss_family != theirs.ss_family) {
    return false;
  }
  if (mine.ss_family == AF_INET) {
    return reinterpret_cast<sockaddr_in*>(&mine)->sin_addr.s_addr ==
           reinterpret_cast<sockaddr_in*>(&theirs)->sin_addr.s_addr;
  }
  return mine.ss_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<sockaddr_in6*>(&mine)->sin6_addr,
                     &reinterpret_cast<sockaddr_in6*>(&theirs)->sin6_addr, sizeof(in6_addr)) == 0;
}

}  // namespace

void ZeroCopy::start(int socket, ZeroCopyMode mode) {
  if (mode == ZeroCopyMode::kOff || (mode == ZeroCopyMode::kAuto && same_address(socket))) return;
  const int yes = 1;
  if (::setsockopt(socket, SOL_SOCKET, SO_ZEROCOPY, &yes, sizeof yes) == 0) assume_on(mode);
}

void ZeroCopy::assume_on(ZeroCopyMode mode) {
  on_ = mode != ZeroCopyMode::kOff;
  gives_up_ = mode == ZeroCopyMode::kAuto;
}

void ZeroCopy::sent() {
  next_++;
  done_.push_back(false);
  counters_.sends++;
}

void ZeroCopy::hold(uint64_t token) {
  FFS_CHECK(outstanding());
  held_.push_back({next_ - 1, token});
}

void ZeroCopy::completed(uint32_t first, uint32_t last, bool copied, std::vector<uint64_t>* released) {
  const uint64_t begin = next_ - done_.size();
  // How far before the next send, in the kernel's numbers, which wrap.
  const auto back = [this](uint32_t number) { return static_cast<uint32_t>(next_) - number; };
  const uint32_t count = last - first + 1;
  for (uint32_t i = 0; i < count; i++) {
    const uint32_t before = back(first + i);
    if (before == 0 || before > done_.size()) continue;  // not ours, or told already
    done_[next_ - before - begin] = true;
  }
  if (copied) counters_.copied += count;
  copied_in_a_row_ = copied ? copied_in_a_row_ + count : 0;
  if (gives_up_ && copied_in_a_row_ >= kMostCopied) on_ = false;
  release_done(released);
}

void ZeroCopy::release_done(std::vector<uint64_t>* released) {
  while (!done_.empty() && done_.front()) done_.pop_front();
  const uint64_t first_undone = next_ - done_.size();
  while (!held_.empty() && held_.front().send < first_undone) {
    released->push_back(held_.front().token);
    held_.pop_front();
  }
  FFS_CHECK(outstanding() || held_.empty());
}

bool ZeroCopy::collect(int socket, std::vector<uint64_t>* released) {
  bool only_reports = true;
  while (true) {
    alignas(cmsghdr) char control[256];
    msghdr message{};
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (::recvmsg(socket, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) {
      if (errno == EINTR) continue;
      return only_reports && (errno == EAGAIN || errno == EWOULDBLOCK);
    }
    for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
      sock_extended_err said;
      if (part->cmsg_len < CMSG_LEN(sizeof said)) continue;
      std::memcpy(&said, CMSG_DATA(part), sizeof said);
      if (said.ee_origin != SO_EE_ORIGIN_ZEROCOPY || said.ee_errno != 0) {
        only_reports = false;
        continue;
      }
      completed(said.ee_info, said.ee_data, (said.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) != 0, released);
    }
  }
}

ZeroCopyCounters ZeroCopy::take_counters() {
  return std::exchange(counters_, {});
}

}  // namespace ffs::net
