// A port of an RDMA device as a shard uses it (docs/rdma.md): one completion channel in the shard's loop, and
// the pools of the shard's buffers registered with it. One shard thread.
#pragma once

#include <array>
#include <memory>

#include "io/io.h"
#include "net/rdma/adapter.h"
#include "net/rdma/channel.h"
#include "server/buffers.h"

namespace ffs::server {

class Shard;

struct RdmaPort {
  Shard* shard = nullptr;
  net::rdma::Adapter* adapter = nullptr;
  std::unique_ptr<net::rdma::Events> events;
  io::Poll poll;
  // The pools that clients' bulk data moves through, registered on the helper thread after the start.
  struct Pool {
    const io::BufferPool* pool = nullptr;
    std::unique_ptr<net::rdma::Registration> registration;
  };
  std::array<Pool, 2> pools;
  bool ready = false;   // that is done
  bool failed = false;  // it can't be done

  // FFS_CHECK: the buffer is of one of them.
  uint32_t key_of(const uint8_t* buffer) const;
};

}  // namespace ffs::server
