// Random operations on a store beside the model, with restarts: closed, killed, power cut. On the simulated
// disk and on files, over both real backends. FFS_SOAK_SECONDS: goes on with new seeds for that long.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "engine_model.h"

using namespace ffs;
using namespace ffs::engine;
using namespace ffs::engine::testing;

namespace {

enum class Ground : uint8_t { sim, sim_protected, uring, pread };
constexpr const char* kGrounds[] = {"the simulated disk", "the simulated disk, protected",
                                    "a file over io_uring", "a file over pread"};

enum class Stop : uint8_t { close, kill, power_cut };

// A store that can be stopped and opened again.
class Place : public Host {
 public:
  virtual void make() = 0;
  virtual Status open() = 0;
  // Lets what runs come to its end and destroys the store.
  virtual Status stop(Stop how) = 0;
  bool damaged() const override { return false; }
};

class SimPlace final : public Place {
 public:
  SimPlace(uint64_t seed, bool space, io::SimDevice device)
      : h_(seed, device), host_(h_), start_(h_.io->image()), random_(seed) {
    h_.space = space;
    h_.journal_bytes = 6u << 20;
  }
  ChunkStore& store() override { return host_.store(); }
  void pass() override { host_.pass(); }
  void tick() override { host_.tick(); }
  size_t moment() const override { return host_.moment(); }
  void make() override { h_.format(); }
  Status open() override { return h_.try_open(); }
  Status stop(Stop how) override {
    if (how == Stop::close) {
      Status closed = h_.store->close();
      h_.store.reset();
      return closed;
    }
    const size_t events = h_.io->log().size();
    h_.settle();
    if (how == Stop::kill) return ok_status();
    io::CrashImages crashes(std::move(start_), h_.io->device());
    for (size_t i = 0; i < events; i++) crashes.advance(h_.io->log()[i]);
    const uint64_t odds = random_() % 6;  // 5: all is kept
    start_ = crashes.crash([&](size_t, size_t) { return random_() % 5 < odds; });
    const io::SimDevice device = h_.io->device();
    h_.io = std::make_unique<io::SimIo>(start_, random_(), device);
    return ok_status();
  }

 private:
  Harness h_;
  SimHost host_;
  io::SimImage start_;  // when the log began
  std::mt19937_64 random_;
};

class FilePlace final : public Place {
 public:
  FilePlace(io::Backend backend, bool space) : space_(space) {
    path_ = directory() + "/ffs-model-test." + std::to_string(::getpid()) + "." + std::to_string(count_++);
    io::Options options;
    options.backend = backend;
    auto made = io::Io::create(options);
    REQUIRE(made.ok());
    io_ = std::move(made.value());
    REQUIRE(io_->backend() == backend);
  }
  ~FilePlace() override {
    store_.reset();
    ::unlink(path_.c_str());
  }
  ChunkStore& store() override { return *store_; }
  void pass() override { moment_++, io_->run_once(200); }
  // Not in every pass: each would be ready at once then, and the threads of the backend would starve.
  void tick() override {
    const auto now = std::chrono::steady_clock::now();
    if (now - ticked_ < std::chrono::microseconds(200)) return;
    ticked_ = now;
    store_->tick(clock_us_ += space_ ? 50'000 : 5'000);
  }
  size_t moment() const override { return moment_; }
  void make() override {
    FormatOptions options = Harness::format_options();
    options.size_bytes = Harness::kDiskBytes;
    options.sparse = true;
    REQUIRE(ChunkStore::format(*io_, path_, options).ok());
  }
  Status open() override {
    OpenOptions options;
    options.cluster = Harness::cluster();
    if (space_) options.discard = Discard::on, options.discard_delay_us = 0, options.compact_eagerly = true;
    auto opened = ChunkStore::open(*io_, path_, options);
    if (!opened.ok()) return opened.error();
    store_ = std::move(opened.value());
    return ok_status();
  }
  Status stop(Stop how) override {
    Status closed = ok_status();
    if (store_ == nullptr) return closed;  // opening failed
    if (how == Stop::close) {
      closed = store_->close();
    } else {
      const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(120);
      while (!store_->idle()) {
        FFS_CHECK(std::chrono::steady_clock::now() < limit);
        tick(), pass();
      }
      while (io_->in_flight() > 0 || io_->has_ready()) pass();
    }
    store_.reset();
    return closed;
  }

 private:
  // In memory if there is such a place: what is tested is the backend, not the patience of a disk.
  static std::string directory() {
    if (const char* named = std::getenv("FFS_TEST_DIR")) return named;
    return ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : ".";
  }
  static inline int count_ = 0;
  std::string path_;
  bool space_;
  std::unique_ptr<io::Io> io_;
  std::unique_ptr<ChunkStore> store_;
  size_t moment_ = 0;
  uint64_t clock_us_ = 1000;
  std::chrono::steady_clock::time_point ticked_;
};

struct RestartOptions {
  uint64_t seed = 1;
  Ground ground = Ground::sim;
  bool space = false;  // compaction and discards, slots of megabytes
  bool full = false;   // chunks of up to 16 MiB until nothing more fits
  uint64_t rounds = 8;
  uint64_t operations = 40;
};

std::unique_ptr<Place> place_of(const RestartOptions& o) {
  io::SimDevice device;
  device.sector_bytes = o.seed % 2 == 0 ? 4096 : 512;
  device.protected_cache = o.ground == Ground::sim_protected;
  if (o.ground == Ground::uring) return std::make_unique<FilePlace>(io::Backend::uring, o.space);
  if (o.ground == Ground::pread) return std::make_unique<FilePlace>(io::Backend::pread, o.space);
  return std::make_unique<SimPlace>(o.seed, o.space, device);
}

std::string restart_once(Place& place, Model& model, Stop how) {
  // Closed, a store says the same afterwards; what was still on its way else may be there or not.
  const std::string before = how == Stop::close ? export_state(place) : "";
  const size_t moment = place.moment();
  if (!place.stop(how).ok()) return "closing fails";
  model.forget_running();
  if (!place.open().ok()) return "opening fails: " + ChunkStore::last_open_message();
  if (how == Stop::close && export_state(place) != before) return "closing and opening change the state";
  Recovered found;
  std::string wrong = model.judge(place, moment, &found);
  if (wrong.empty()) model.resume(found);
  return wrong;
}

std::string replay_of(const RestartOptions& o) {
  std::string text;
  for (uint64_t part : {o.seed, static_cast<uint64_t>(o.ground), static_cast<uint64_t>(o.space),
                        static_cast<uint64_t>(o.full), o.rounds, o.operations})
    text += (text.empty() ? "" : " ") + std::to_string(part);
  return std::string("\non ") + kGrounds[static_cast<int>(o.ground)] + ", to repeat: FFS_RESTARTS='" + text +
         "' test_engine --test-case='model replay*'";
}

// What the model was answered is added to `*full`: how often there was no room.
std::string run(const RestartOptions& o, uint64_t* full = nullptr) {
  ModelOptions options;
  options.seed = o.seed;
  options.keys = o.full ? 30 : o.space ? 24 : 3 + o.seed % 8;
  options.max_bytes = 300'000;
  options.space = o.space;
  options.huge = o.full;
  options.may_fill = o.full || o.space;
  options.transfers = o.seed % 2 == 0;
  auto place = place_of(o);
  Model model(options);
  std::mt19937_64 random(o.seed);
  place->make();
  std::string wrong;
  if (!place->open().ok()) wrong = "opening fails: " + ChunkStore::last_open_message();
  for (uint64_t round = 0; wrong.empty() && round < o.rounds; round++) {
    const bool simulated = o.ground == Ground::sim || o.ground == Ground::sim_protected;
    const Stop how = random() % 3 == 0 ? Stop::close : simulated ? Stop::power_cut : Stop::kill;
    model.operate(*place, o.operations, how == Stop::power_cut && random() % 4 != 0);
    wrong = model.failure();
    if (wrong.empty()) wrong = place->store().check_consistency();
    if (wrong.empty()) wrong = restart_once(*place, model, how);
  }
  if (full != nullptr) *full += model.answered(ENOSPC);
  if (!wrong.empty() && model.failure().empty()) model.fail(wrong);
  (void)place->stop(Stop::kill);
  model.forget_running();
  if (wrong.empty()) return "";
  return wrong + replay_of(o);
}

void check(const RestartOptions& options, uint64_t* full = nullptr) {
  std::string wrong = run(options, full);
  CHECK_MESSAGE(wrong.empty(), wrong);
}

}  // namespace

TEST_CASE("model replay of a failure") {
  const char* text = std::getenv("FFS_RESTARTS");
  if (text == nullptr) return;
  RestartOptions o;
  int ground, space, full;
  REQUIRE(std::sscanf(text, "%lu %d %d %d %lu %lu", &o.seed, &ground, &space, &full, &o.rounds,
                      &o.operations) == 6);
  o.ground = static_cast<Ground>(ground);
  o.space = space != 0;
  o.full = full != 0;
  check(o);
}

TEST_CASE(
    "model with restarts on the simulated disk: closed or cut off, it goes on from what it acknowledged") {
  for (uint64_t seed = 1; seed <= 6; seed++) {
    RestartOptions options;
    options.seed = seed;
    options.ground = seed % 3 == 0 ? Ground::sim_protected : Ground::sim;
    options.space = seed % 3 == 1;
    check(options);
  }
}

TEST_CASE("model with restarts on a file, over both backends") {
  for (uint64_t seed = 11; seed <= 12; seed++) {
    for (auto ground : {Ground::uring, Ground::pread}) {
      RestartOptions options;
      options.seed = seed;
      options.ground = ground;
      options.space = seed % 2 == 1;
      options.rounds = 3;
      check(options);
    }
  }
}

TEST_CASE("model with restarts on a device that is full again and again") {
  uint64_t full = 0;
  for (uint64_t seed = 21; seed <= 22; seed++) {
    RestartOptions options;
    options.seed = seed;
    options.full = true;
    options.rounds = 3;
    options.operations = 60;
    check(options, &full);
  }
  CHECK(full > 0);
}

TEST_CASE("crash soak of restarts: new seeds until the time is over") {
  const char* text = std::getenv("FFS_SOAK_SECONDS");
  if (text == nullptr) return;
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::strtol(text, nullptr, 10));
  auto seed = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  uint64_t runs = 0, full = 0;
  for (; std::chrono::steady_clock::now() < end; seed++, runs++) {
    RestartOptions options;
    options.seed = seed;
    options.ground = static_cast<Ground>(runs % 4);
    options.space = runs / 4 % 2 == 0;
    options.full = runs / 8 % 4 == 0;
    options.rounds = options.full ? 6 : 20;
    INFO(replay_of(options));  // printed also if the process is ended by a check
    std::string wrong = run(options, &full);
    REQUIRE_MESSAGE(wrong.empty(), wrong);
  }
  MESSAGE("soak: " << runs << " runs, full " << full << " times");
}
