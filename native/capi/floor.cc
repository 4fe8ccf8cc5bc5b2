// ffs_floor_*: see native/bench.
#include "bench/floor.h"

#include <cstring>
#include <string>

#include "capi/error.h"
#include "ffs/ffs.h"
#include "net/socket.h"

struct ffs_floor {
  std::unique_ptr<ffs::bench::Floor> floor;
  std::string name;
};

extern "C" {

int ffs_floor_open(const ffs_floor_options* options, ffs_floor** out) {
  if (options == nullptr || out == nullptr || options->struct_size < sizeof(ffs_floor_options)) {
    return ffs::capi::fail(EINVAL,
                           "floor: options with their struct_size and a place for the handle are needed");
  }
  if (options->path == nullptr && options->op != 3) return ffs::capi::fail(EINVAL, "floor: path is needed");
  ffs::bench::FloorOptions o;
  o.op = static_cast<ffs::bench::FloorOp>(options->op);
  o.path = options->path != nullptr ? options->path : "";
  o.region_bytes = options->region_bytes;
  o.region_offset = options->region_offset;
  o.block_bytes = options->block_bytes;
  o.depth = options->depth;
  o.random = options->random != 0;
  o.crc = options->crc != 0;
  o.fsync_every = options->fsync_every;
  o.congestion = options->tcp_congestion != nullptr ? options->tcp_congestion : "cubic?";
  auto floor = ffs::bench::open_floor(o);
  if (!floor.ok()) return ffs::capi::fail(floor.error(), "floor " + o.path);
  *out = new ffs_floor{std::move(*floor), o.path};
  return 0;
}

int ffs_floor_run(ffs_floor* floor, uint32_t duration_ms, uint64_t* blocks, uint64_t* elapsed_ns) {
  auto count = floor->floor->run(duration_ms);
  if (!count.ok()) return ffs::capi::fail(count.error(), "floor " + floor->name);
  *blocks = count->blocks;
  *elapsed_ns = count->elapsed_ns;
  return 0;
}

void ffs_floor_close(ffs_floor* floor) {
  delete floor;
}

int ffs_floor_serve(const char* host, int* port_inout, int listen_fd, const char* tcp_congestion) {
  ffs::Fd own;
  if (listen_fd < 0) {
    if (host == nullptr || port_inout == nullptr)
      return ffs::capi::fail(EINVAL, "floor server: host and port are needed");
    auto listener = ffs::net::listen_tcp(host, static_cast<uint16_t>(*port_inout),
                                         tcp_congestion != nullptr ? tcp_congestion : "cubic?");
    if (!listener.ok()) return ffs::capi::fail(listener.error(), "floor server");
    own = std::move(*listener);
    auto port = ffs::net::bound_port(own);
    if (!port.ok()) return ffs::capi::fail(port.error(), "floor server");
    *port_inout = *port;
    listen_fd = own.get();
  }
  auto status = ffs::bench::serve_floor(listen_fd);
  return status.ok() ? 0 : ffs::capi::fail(status.error(), "floor server");
}

}  // extern "C"
