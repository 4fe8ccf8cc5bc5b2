// HMAC-SHA256, from libcrypto. No state; any thread. Keys and what is computed are never logged.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "ffs/wire.h"

namespace ffs::net {

constexpr size_t kMacBytes = 32;
using MacKey = std::array<uint8_t, kMacBytes>;
using Mac = std::array<uint8_t, kMacBytes>;

// Over the pieces as if they were one. FFS_CHECK: together at most 512 bytes.
Mac mac_of(const MacKey& key, std::initializer_list<std::span<const uint8_t>> pieces);
// In a time that doesn't depend on where they differ.
bool same_mac(const Mac& a, const uint8_t (&b)[kMacBytes]);
// The signature of a capability: of all before `mac`.
Mac capability_mac(const MacKey& key, const wire::Capability& capability);
// From the kernel. False: there is none to be had.
bool random_bytes(std::span<uint8_t> out);

}  // namespace ffs::net
