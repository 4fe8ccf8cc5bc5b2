#if FFS_HAVE_VERBS
#include "net/rdma/verbs.h"

#include <dlfcn.h>

namespace ffs::net::rdma {

namespace {

struct Loaded {
  Verbs verbs{};
  bool good = false;
};

Loaded load() {
  Loaded out;
  void* library = ::dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed: devices stay open
  if (library == nullptr) return out;
  bool good = true;
  const auto find = [&](auto& function, const char* name, bool needed = true) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    good = good && (function != nullptr || !needed);
  };
  Verbs& v = out.verbs;
  find(v.get_device_list, "ibv_get_device_list");
  find(v.free_device_list, "ibv_free_device_list");
  find(v.get_device_name, "ibv_get_device_name");
  find(v.open_device, "ibv_open_device");
  find(v.close_device, "ibv_close_device");
  find(v.query_device, "ibv_query_device");
  find(v.query_port, "ibv_query_port");
  find(v.query_gid, "ibv_query_gid");
  find(v.alloc_pd, "ibv_alloc_pd");
  find(v.dealloc_pd, "ibv_dealloc_pd");
  find(v.reg_mr, "ibv_reg_mr_iova2");
  find(v.reg_dmabuf_mr, "ibv_reg_dmabuf_mr", false);
  find(v.dereg_mr, "ibv_dereg_mr");
  find(v.create_comp_channel, "ibv_create_comp_channel");
  find(v.destroy_comp_channel, "ibv_destroy_comp_channel");
  find(v.create_cq, "ibv_create_cq");
  find(v.destroy_cq, "ibv_destroy_cq");
  find(v.get_cq_event, "ibv_get_cq_event");
  find(v.ack_cq_events, "ibv_ack_cq_events");
  find(v.create_qp, "ibv_create_qp");
  find(v.modify_qp, "ibv_modify_qp");
  find(v.destroy_qp, "ibv_destroy_qp");
  find(v.wc_status_str, "ibv_wc_status_str");
  out.good = good;
  return out;
}

}  // namespace

Result<const Verbs*> load_verbs() {
  static const Loaded loaded = load();
  if (!loaded.good) {
    return Error::of(ENOSYS,
                     "libibverbs.so.1 isn't installed, or older than rdma-core 28: install libibverbs1 "
                     "and ibverbs-providers");
  }
  return &loaded.verbs;
}

}  // namespace ffs::net::rdma
#endif
