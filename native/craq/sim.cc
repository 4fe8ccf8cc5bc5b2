// The C face of the simulator's target (sim.h).
#include "craq/sim.h"

#include <cerrno>

#include "craq/sim_target.h"

struct ffs_sim {
  explicit ffs_sim(const ffs_sim_options& options) : target(options) {}
  ffs::craq::sim::Target target;
};

extern "C" {

ffs_sim* ffs_sim_create(const ffs_sim_options* options) {
  if (options == nullptr || options->struct_size != sizeof(ffs_sim_options)) return nullptr;
  if (options->target == 0 || options->max_pendings == 0 || options->max_pendings_per_chunk == 0 ||
      options->resend_ms == 0 || options->suspect_ms == 0 || options->sync_window == 0) {
    return nullptr;
  }
  return new ffs_sim(*options);
}

void ffs_sim_destroy(ffs_sim* sim) {
  delete sim;
}

int ffs_sim_step(ffs_sim* sim, const uint8_t* event, size_t event_bytes, const uint8_t** effects,
                 size_t* effects_bytes) {
  bool ok = sim->target.step(ffs::Reader(event, event_bytes));
  *effects = sim->target.answer().data();
  *effects_bytes = sim->target.answer().size();
  return ok ? 0 : -EINVAL;
}

}  // extern "C"
