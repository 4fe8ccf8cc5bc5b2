// VerbsPair: a queue pair of a real (or software) RDMA device, with the memory of its messages.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ffs/wire.h"
#include "net/rdma/adapter.h"
#include "net/rdma/channel.h"
#include "net/rdma/pair.h"
#include "net/shared_memory.h"

struct ibv_cq;
struct ibv_qp;

namespace ffs::net::rdma {

class VerbsPair : public Pair {
 public:
  // `owner` is what Events::take gives. Access::kThere: the other side may use memory of this process that is
  // registered so. Blocks (system calls). Receive buffers are posted; connect() is next.
  static Result<std::unique_ptr<VerbsPair>> create(Adapter& adapter, Events& events, void* owner,
                                                   const Shape& shape, Access access);
  ~VerbsPair() override;

  wire::RdmaEnd end() const { return end_; }  // to be told to the other side
  // EINVAL: its values can't be. Blocks (system calls).
  Status connect(const wire::RdmaEnd& theirs, uint8_t traffic_class);
  // The channel over a connected pair, which it owns.
  static std::unique_ptr<Channel> channel(std::unique_ptr<VerbsPair> pair, const wire::RdmaEnd& theirs);

  Status post(std::span<const Work> work) override;
  Status post_receives(std::span<const uint32_t> buffers) override;
  int poll(std::span<Completion> out) override;
  Status arm() override;
  const char* fault_name(uint32_t fault) const override;

 private:
  explicit VerbsPair(Adapter& adapter) : adapter_(adapter) {}

  Adapter& adapter_;
  Shape shape_;
  Mapping memory_;
  std::unique_ptr<Registration> registration_;
  ibv_cq* completions_ = nullptr;
  ibv_qp* queues_ = nullptr;
  wire::RdmaEnd end_{};
  pid_t process_ = ::getpid();
};

}  // namespace ffs::net::rdma
