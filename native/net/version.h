// Which protocol versions this process speaks on data connections, and which one two sides choose
// (docs/wire_format.md, Connection frames). Frames up to and including the reply to hello are of
// kHelloVersion; the others of the version that was chosen.
#pragma once

#include <cstdint>

namespace ffs::net {

struct Versions {
  uint8_t least = 0;
  uint8_t most = 0;
};

// {kProtocolVersion, kProtocolVersion} unless set. Set before anything connects or listens: a test of
// upgrades lets one build report another version; a new build is held back to the old one with it.
Versions spoken_versions();
void set_spoken_versions(Versions versions);  // least <= most, not 0

// The highest that both speak; 0: there is none.
uint8_t choose_version(Versions ours, Versions theirs);

}  // namespace ffs::net
