#include "net/mac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <cstddef>
#include <cstring>

#include "base/check.h"

namespace ffs::net {

namespace {
// What is signed with a key says what for, so that nothing signed for one use serves another.
constexpr char kCapabilityLabel[] = "ffs capability 1";
constexpr size_t kSignedBytes = offsetof(wire::Capability, mac);
static_assert(kSignedBytes == 56);
}  // namespace

Mac mac_of(const MacKey& key, std::initializer_list<std::span<const uint8_t>> pieces) {
  std::array<uint8_t, 512> said;
  size_t size = 0;
  for (const auto& piece : pieces) {
    FFS_CHECK(piece.size() <= said.size() - size);
    std::memcpy(said.data() + size, piece.data(), piece.size());
    size += piece.size();
  }
  Mac out{};
  unsigned length = 0;
  const uint8_t* made = ::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()), said.data(), size,
                               out.data(), &length);
  FFS_CHECK(made != nullptr && length == out.size());
  return out;
}

bool same_mac(const Mac& a, const uint8_t (&b)[kMacBytes]) {
  return ::CRYPTO_memcmp(a.data(), b, kMacBytes) == 0;
}

Mac capability_mac(const MacKey& key, const wire::Capability& capability) {
  return mac_of(key, {std::span(reinterpret_cast<const uint8_t*>(kCapabilityLabel), sizeof kCapabilityLabel),
                      std::span(reinterpret_cast<const uint8_t*>(&capability), kSignedBytes)});
}

bool random_bytes(std::span<uint8_t> out) {
  return ::getrandom(out.data(), out.size(), 0) == static_cast<ssize_t>(out.size());
}

}  // namespace ffs::net
