// libibverbs, loaded when it is first asked for: a host without it runs ffs all the same, and nothing links
// to it. The header's inline functions go through the device's own table. Included by this folder only, and
// only where the build has the headers.
#pragma once

#include <infiniband/verbs.h>

#include "base/result.h"

// Macros around symbols that we call by pointer.
#undef ibv_query_port
#undef ibv_get_device_list
#undef ibv_reg_mr

namespace ffs::net::rdma {

struct Verbs {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  // The symbol fills the first part of ibv_port_attr only, which is all that is looked at here.
  int (*query_port)(ibv_context*, uint8_t, ibv_port_attr*);
  decltype(&::ibv_query_gid) query_gid;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  decltype(&::ibv_reg_mr_iova2) reg_mr;
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr;  // null: too old
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_wc_status_str) wc_status_str;
};

// ENOSYS: the library isn't installed, or lacks what is needed. Any thread.
Result<const Verbs*> load_verbs();

}  // namespace ffs::net::rdma
