// Whether a read's data has the checksums that its writer computed (docs/ring.md, Checksums). Pure.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffs/wire.h"

namespace ffs::client {

// How far one reply's data has been compared.
struct GranuleCheck {
  size_t checked = 0;  // granules
  bool sound = true;
};

// Goes on with the granules of which `arrived` bytes of the reply hold all. `begin`: of the read, in the
// chunk.
void check_granules(const wire::ReadReply& reply, const uint32_t* crcs, size_t count, uint64_t begin,
                    const uint8_t* data, uint64_t arrived, GranuleCheck* check);

// The same for data that is all there, copied to `to` in the same pass: what was compared is the copy.
void copy_granules(const wire::ReadReply& reply, const uint32_t* crcs, size_t count, uint64_t begin,
                   const uint8_t* data, uint8_t* to, GranuleCheck* check);

}  // namespace ffs::client
