// Devices that do wrong and don't say so: lost, torn, misdirected, flipped writes, flipped reads, bits that
// rot. What holds (docs/faults.md): nothing wrong is ever served, whatever is done to the chunk afterwards;
// what was acknowledged before, and is known by a later block of the journal to have been flushed, is there
// or refused by name: the chunk as unreadable, or the device as damaged.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <tuple>

#include "engine/format.h"
#include "engine_model.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

enum class Part : uint8_t { anywhere, superblocks, journal, snapshots, data };
constexpr const char* kParts[] = {"anywhere", "in the superblocks", "in the journal", "in the snapshots",
                                  "in the data"};
constexpr const char* kKinds[] = {
    "rot", "a lost write", "a torn write", "a misdirected write", "a flipped write", "a flipped read"};

struct FaultTally {
  uint64_t runs = 0, struck = 0, refused = 0, unreadable = 0, answered_damage = 0;
};

class FaultRun {
 public:
  FaultRun(uint64_t seed, io::SimFault::Kind kind, Part part, bool space)
      : seed_(seed),
        kind_(kind),
        part_(part),
        random_(seed),
        model_(options(seed, space)),
        h_(seed),
        host_(h_) {
    h_.space = space;
    if (seed % 2 == 0) h_.write_ahead_bytes = 1;
  }
  ~FaultRun() { h_.settle(); }

  std::string run(FaultTally* tally) {
    std::string wrong = go();
    h_.settle();
    model_.forget_running();
    tally->runs++;
    tally->struck += h_.io->struck();
    tally->refused += refused_;
    tally->unreadable += model_.unreadable();
    tally->answered_damage += model_.answered(EBADMSG);
    if (wrong.empty()) return "";
    return std::string(kKinds[kind_]) + " " + kParts[static_cast<int>(part_)] + ": " + wrong +
           "\nto repeat: FFS_FAULT='" + std::to_string(seed_) + " " + std::to_string(kind_) + " " +
           std::to_string(static_cast<int>(part_)) + " " + std::to_string(h_.space) +
           "' test_engine --test-case='fault replay*'";
  }

 private:
  static ModelOptions options(uint64_t seed, bool space) {
    ModelOptions o;
    o.seed = seed;
    o.keys = space ? 16 : 6;
    o.max_bytes = 120'000;
    o.space = space;
    o.transfers = seed % 3 == 0;
    o.may_fill = space;
    return o;
  }

  std::pair<uint64_t, uint64_t> range() const {
    const Superblock& s = layout_;
    switch (part_) {
      case Part::superblocks:
        return {0, s.journal_offset};
      case Part::journal:
        return {s.journal_offset, s.journal_offset + s.journal_bytes};
      case Part::snapshots:
        return {s.snapshot_offset[0], s.data_offset};
      case Part::data:
        return {s.data_offset, h_.io->size_bytes()};
      default:
        return {0, h_.io->size_bytes()};
    }
  }

  // What is acknowledged now is known to be flushed by a block that comes later.
  void mark() {
    for (uint64_t i = 1; i <= 2; i++) {
      bool done = false;
      StoreOp op;
      op.owner = &done;
      op.done = [](StoreOp* o) { *static_cast<bool*>(o->owner) = true; };
      h_.store->set_space_epoch(TargetId(Harness::kTarget), 1, {i, 0}, &op);
      host_.run_until(done);
    }
  }

  // A bit of something that was written within the part.
  void rot() {
    const auto [from, to] = range();
    const auto& log = h_.io->log();
    for (int tries = 0; tries < 1000; tries++) {
      const io::SimEvent& event = log[random_() % log.size()];
      if (event.kind != io::SimEvent::write_started || event.offset < from || event.offset >= to) continue;
      h_.io->rot(event.offset + random_() % event.bytes->size(), static_cast<uint8_t>(1u << random_() % 8));
      return;
    }
  }

  void strike() {
    if (kind_ == io::SimFault::none) return rot();
    io::SimFault fault;
    fault.kind = kind_;
    fault.skip = random_() % 12;
    std::tie(fault.from, fault.to) = range();
    h_.io->inject(fault);
  }

  // Opens again; false: refused by name, or `wrong`.
  bool restart(std::string* wrong) {
    if (random_() % 3 == 0) {
      if (!h_.store->close().ok()) *wrong = "closing fails";
      h_.store.reset();
    } else {
      h_.settle();
    }
    model_.forget_running();
    Status opened = h_.try_open();
    if (opened.ok()) return wrong->empty();
    if (opened.error().code == EBADMSG && h_.io->struck() && !ChunkStore::last_open_message().empty()) {
      refused_ = true;
    } else {
      *wrong = "opening fails: " + ChunkStore::last_open_message();
    }
    return false;
  }

  std::string go() {
    h_.journal_bytes = 6u << 20;
    h_.format();
    h_.io->image().read(0, reinterpret_cast<uint8_t*>(&layout_), sizeof layout_);
    h_.open();
    model_.operate(host_, 40);
    if (part_ == Part::snapshots || part_ == Part::superblocks) {
      h_.store->start_snapshot();
      model_.operate(host_, 20);
    }
    if (!model_.failure().empty()) return model_.failure();
    mark();
    size_t trusted = host_.moment();
    strike();
    std::string wrong;
    for (int round = 0; round < 3; round++) {
      if (part_ != Part::data && round == 1) h_.store->start_snapshot();
      model_.operate(host_, 30);
      if (!model_.failure().empty()) return model_.failure();
      Recovered found;
      wrong = model_.judge(host_, host_.moment(), &found);  // nothing is lost while it runs
      if (!wrong.empty()) return "while it runs: " + wrong;
      const size_t moment = host_.moment();
      if (!restart(&wrong)) return wrong;
      wrong = model_.judge(host_, moment, &found, trusted);
      if (!wrong.empty()) return "after a restart: " + wrong;
      model_.resume(found);
      trusted = 0;
    }
    return h_.io->misuse();
  }

  uint64_t seed_;
  io::SimFault::Kind kind_;
  Part part_;
  std::mt19937_64 random_;
  Superblock layout_;
  Model model_;
  Harness h_;
  SimHost host_;
  bool refused_ = false;
};

FaultTally run_all(io::SimFault::Kind kind, Part part, uint64_t first, uint64_t seeds) {
  FaultTally tally;
  for (uint64_t seed = first; seed < first + seeds; seed++) {
    FaultRun fault_run(seed, kind, part, seed % 4 == 0);
    std::string wrong = fault_run.run(&tally);
    CHECK_MESSAGE(wrong.empty(), wrong);
  }
  return tally;
}

}  // namespace

TEST_CASE("fault replay of a failure") {
  const char* text = std::getenv("FFS_FAULT");
  if (text == nullptr) return;
  uint64_t seed;
  int kind, part, space;
  REQUIRE(std::sscanf(text, "%lu %d %d %d", &seed, &kind, &part, &space) == 4);
  FaultTally tally;
  FaultRun fault_run(seed, static_cast<io::SimFault::Kind>(kind), static_cast<Part>(part), space != 0);
  std::string wrong = fault_run.run(&tally);
  CHECK_MESSAGE(wrong.empty(), wrong);
  MESSAGE("struck " << tally.struck << ", refused " << tally.refused << ", unreadable " << tally.unreadable);
}

TEST_CASE(
    "faults of the device in the data: chunks are unreadable by name, never wrong, and nothing spreads") {
  FaultTally all;
  for (auto kind :
       {io::SimFault::none, io::SimFault::lost_write, io::SimFault::torn_write,
        io::SimFault::misdirected_write, io::SimFault::flipped_write, io::SimFault::flipped_read}) {
    FaultTally tally = run_all(kind, Part::data, 1, 6);
    CHECK(tally.struck > 0);
    CHECK(tally.refused == 0);  // one chunk's damage is no reason to refuse the others
    all.unreadable += tally.unreadable;
  }
  CHECK(all.unreadable > 10);
}

TEST_CASE("faults of the device elsewhere: it opens with what is right, or is refused by name") {
  uint64_t refused = 0;
  for (auto part : {Part::anywhere, Part::superblocks, Part::journal, Part::snapshots}) {
    FaultTally tally;
    for (auto kind :
         {io::SimFault::none, io::SimFault::lost_write, io::SimFault::torn_write,
          io::SimFault::misdirected_write, io::SimFault::flipped_write, io::SimFault::flipped_read}) {
      FaultTally one = run_all(kind, part, 11, 3);
      tally.struck += one.struck;
      refused += one.refused;
    }
    CHECK(tally.struck > 0);
  }
  CHECK(refused > 3);
}

TEST_CASE("crash soak of faults: new seeds until the time is over") {
  const char* text = std::getenv("FFS_SOAK_SECONDS");
  if (text == nullptr) return;
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::strtol(text, nullptr, 10));
  auto seed = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  FaultTally tally;
  for (; std::chrono::steady_clock::now() < end; seed++) {
    const auto kind = static_cast<io::SimFault::Kind>(seed % 6);
    FaultRun fault_run(seed, kind, static_cast<Part>(seed / 6 % 5), seed / 30 % 3 == 0);
    std::string wrong = fault_run.run(&tally);
    REQUIRE_MESSAGE(wrong.empty(), wrong);
  }
  MESSAGE("soak: " << tally.runs << " runs, struck " << tally.struck << ", refused " << tally.refused
                   << ", unreadable " << tally.unreadable);
}
