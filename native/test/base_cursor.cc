#include <doctest/doctest.h>

#include "base/cursor.h"

using namespace ffs;

TEST_CASE("a writer's fields come back from a reader") {
  uint8_t memory[64];
  Writer w(memory, sizeof memory);
  w.u8(7), w.u16(0x1234), w.u32(0x89abcdef), w.u64(0x0123456789abcdefull), w.bytes("xyz", 3), w.zeros(2);
  w.patch<uint16_t>(1, 0x4321);
  REQUIRE(w.ok());
  CHECK(memory[1] == 0x21);  // little-endian
  Reader r(w.written());
  CHECK(r.u8() == 7);
  CHECK(r.u16() == 0x4321);
  CHECK(r.u32() == 0x89abcdef);
  CHECK(r.u64() == 0x0123456789abcdefull);
  CHECK(r.bytes(3)[2] == 'z');
  r.skip(2);
  CHECK(r.done());
}

TEST_CASE("a cursor that ran over its end stays failed and touches nothing") {
  uint8_t memory[4] = {1, 2, 3, 4};
  Reader r(memory, 4);
  CHECK(r.u16() == 0x0201);
  CHECK(r.u32() == 0);
  CHECK_FALSE(r.ok());
  CHECK(r.u8() == 0);
  CHECK(r.bytes(1).empty());
  CHECK_FALSE(r.done());
  Writer w(memory, 2);
  w.u32(9);
  CHECK_FALSE(w.ok());
  CHECK(memory[0] == 1);
  w.u8(9);
  CHECK(w.size() == 0);
  w.patch<uint8_t>(0, 5);
  CHECK(memory[0] == 1);
}
