// Operations whose instructions callgrind counts (tests/guest/instructions.py, docs/rdma.md): the client is
// the program's main thread, the server all others. Not a test: it is run by its name, over the one transport
// of FFS_TEST_TRANSPORTS. FFS_COST says what: "read 4096 1 100" is the kind, bytes, how many at once, how
// many times.
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>

#include <sstream>

#include "test/transport_world.h"

using namespace ffs;
using namespace ffs::transport::testing;

TEST_CASE("cost" * doctest::skip()) {
  const char* wanted = std::getenv("FFS_COST");
  REQUIRE(wanted != nullptr);
  std::istringstream in(wanted);
  std::string kind;
  uint32_t bytes = 0, at_once = 0, times = 0;
  in >> kind >> bytes >> at_once >> times;
  REQUIRE(!in.fail());
  REQUIRE((kind == "read" || kind == "write"));
  REQUIRE(at_once <= 16);
  REQUIRE(uint64_t{bytes} * at_once <= 1u << 20);
  const auto all = choices();
  REQUIRE(all.size() == 1);
  client::ClientOptions patient;
  patient.request_timeout_ms = patient.try_timeout_ms = 600000;
  World w(all[0], {}, patient);
  OpenIov iov(1u << 20);
  const auto data = pattern(1 << 20, 3);
  std::memcpy(iov.data(), data.data(), data.size());
  REQUIRE(w.one(w.sqe(FFS_OP_WRITE, 1, 0, 1 << 20, *iov, 0)) == 1 << 20);
  std::vector<ffs_sqe> entries;
  for (uint32_t i = 0; i < at_once; i++) {
    const uint8_t op = kind == "read" ? FFS_OP_READ : FFS_OP_WRITE;
    entries.push_back(w.sqe(op, 1, i * bytes, bytes, *iov, i * bytes));
  }
  const auto run = [&] {
    REQUIRE(w.ring->prepare(entries.data(), at_once).taken == at_once);
    ffs_cqe done[16];
    uint32_t events = 0;
    for (uint32_t got = 0; got < at_once;) {
      const uint32_t more = w.ring->wait(done, 16, at_once - got, 60000, &events);
      for (uint32_t i = 0; i < more; i++) REQUIRE(done[i].result == bytes);
      got += more;
    }
  };
  for (int i = 0; i < 3; i++) run();
  CALLGRIND_START_INSTRUMENTATION;
  for (uint32_t i = 0; i < times; i++) run();
  CALLGRIND_STOP_INSTRUMENTATION;
  CHECK(std::memcmp(iov.data(), data.data(), data.size()) == 0);
  if (all[0] == TransportChoice::kRdma) CHECK(w.ring->stats().bytes_copied == 0);
}
#endif
