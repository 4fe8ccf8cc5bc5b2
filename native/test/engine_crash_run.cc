#include "engine_crash_run.h"

#include <malloc.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>

#include "engine/format.h"

namespace ffs::engine::testing {

namespace {

constexpr const char* kLosses[] = {"nothing unsynced kept", "all kept", "whole writes lost", "sectors lost"};

// What every field of the options is called in the text.
template <typename Options, typename Visit>
void each_field(Options& o, Visit visit) {
  visit("seed", o.seed);
  visit("operations", o.operations);
  visit("keys", o.keys);
  visit("in_flight", o.max_in_flight);
  visit("largest", o.max_bytes);
  visit("stride", o.prefix_stride);
  visit("all_kinds", o.all_kinds);
  visit("nested", o.nested);
  visit("transfers", o.transfers);
  visit("space", o.space);
  visit("huge", o.huge);
  visit("may_fill", o.may_fill);
  visit("ahead", o.ahead);
  visit("after", o.after);
  visit("dedup", o.dedup);
  visit("sector", o.device.sector_bytes);
  visit("protected", o.device.protected_cache);
  visit("lying", o.lying_device);
  visit("mutant_acknowledge", o.mutants.acknowledge_without_flush);
  visit("mutant_earlier_flush", o.mutants.acknowledge_with_earlier_flush);
  visit("mutant_flush_before_data", o.mutants.flush_before_data);
  visit("mutant_replay", o.mutants.replay_without_verification);
  visit("mutant_reuse", o.mutants.reuse_slot_before_flush);
  visit("mutant_discard", o.mutants.discard_before_flush);
  visit("mutant_share", o.mutants.free_shared_with_first_name);
}

Superblock layout_of(const io::SimImage& image) {
  Superblock super;
  image.read(0, reinterpret_cast<uint8_t*>(&super), sizeof super);
  return super;
}

}  // namespace

std::string text_of(const CrashOptions& options) {
  const CrashOptions defaults;
  std::map<std::string, uint64_t> usual;
  each_field(defaults, [&](const char* name, auto value) { usual[name] = static_cast<uint64_t>(value); });
  std::string text;
  each_field(options, [&](const char* name, auto value) {
    const auto number = static_cast<uint64_t>(value);
    if (number != usual[name])
      text += std::string(text.empty() ? "" : " ") + name + "=" + std::to_string(number);
  });
  return text;
}

CrashOptions crash_options_of(const std::string& text) {
  CrashOptions options;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    bool known = false;
    each_field(options, [&](const std::string& name, auto& value) {
      if (!word.starts_with(name + "=")) return;
      known = true;
      value = static_cast<std::remove_reference_t<decltype(value)>>(
          std::strtoull(word.c_str() + name.size() + 1, nullptr, 10));
    });
    FFS_CHECK(known);  // a field of that name exists
  }
  return options;
}

io::SimImage CrashRun::lose(const io::CrashImages& crashes, uint64_t kind) {
  const uint64_t odds = random_() % 5;
  std::vector<bool> writes;
  for (size_t i = 0; i < crashes.loose_writes(); i++) writes.push_back(random_() % 5 < odds);
  return crashes.crash([&](size_t write, size_t) {
    if (kind < 2) return kind == 1;
    return kind == 2 ? static_cast<bool>(writes[write]) : random_() % 5 < odds;
  });
}

// Power fails while the recovery that has just ended was going on.
std::string CrashRun::crash_recovery(Harness& h, const io::SimImage& start, size_t prefix,
                                     const std::string& how, uint32_t depth) {
  const std::vector<io::SimEvent>& log = h.io->log();
  const size_t end = log.size();
  for (int tries = depth == 0 ? 2 : 1; tries > 0; tries--) {
    io::CrashImages crashes(start, truth());
    const size_t until = random_() % (end + 1);
    for (size_t i = 0; i < until; i++) crashes.advance(log[i]);
    const uint64_t kind = random_() % 4;
    coverage_.nested++;
    const std::string also =
        how + ", then after event " + std::to_string(until) + " of the recovery, " + kLosses[kind];
    std::string wrong = check(lose(crashes, kind), prefix, also, depth + 1);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

// What a recovery answered stays so: after another power cut, after another opening, after closing.
std::string CrashRun::check_again(Harness& h, const io::SimImage& start, const Recovered& found) {
  coverage_.recovered_again++;
  SimHost host(h);
  const std::string answered = export_state(host);
  io::CrashImages crashes(start, truth());
  for (const io::SimEvent& event : h.io->log()) crashes.advance(event);
  Harness cut(h.seed + 1, crashes.crash([](size_t, size_t) { return false; }), options_.device);
  cut.space = options_.space;
  if (!cut.try_open().ok()) return "the second recovery fails: " + ChunkStore::last_open_message();
  SimHost cut_host(cut);
  if (export_state(cut_host) != answered) return "the second recovery changes the state";
  h.settle();
  if (!h.try_open().ok()) return "opening again fails: " + ChunkStore::last_open_message();
  if (export_state(host) != answered) return "opening again changes the state";
  if (!h.store->close().ok()) return "closing fails";
  h.store.reset();
  if (!h.try_open().ok()) return "opening after closing fails: " + ChunkStore::last_open_message();
  if (export_state(host) != answered) return "closing changes the state";
  return model_.compare(host, found);
}

std::string CrashRun::check(io::SimImage image, size_t prefix, const std::string& how, uint32_t depth) {
  coverage_.crashes++;
  const io::SimImage start = image;
  Harness h(options_.seed * 1000 + prefix + depth, std::move(image), options_.device);
  h.space = options_.space;
  const std::string at = " (power cut after event " + std::to_string(prefix) + ", " + how + ")";
  Mutants mutants;
  mutants.replay_without_verification = options_.mutants.replay_without_verification;
  if (!h.try_open(mutants).ok()) return "recovery fails: " + ChunkStore::last_open_message() + at;
  // Before anything is read: the log is the recovery's.
  if (depth < options_.nested && (depth > 0 || coverage_.crashes % 8 == 0)) {
    std::string wrong = crash_recovery(h, start, prefix, how, depth);
    if (!wrong.empty()) return wrong;
  }
  SimHost host(h);
  Recovered found;
  std::string wrong = model_.judge(host, prefix, &found);
  if (wrong.empty() && coverage_.crashes % 8 == 3) wrong = check_again(h, start, found);
  if (wrong.empty()) wrong = h.io->misuse();
  return wrong.empty() ? "" : wrong + at;
}

std::string CrashRun::operate(Harness& h, SimHost& host) {
  const uint64_t syncs = h.io->syncs();
  model_.operate(host, options_.operations);
  metrics_ = h.store->metrics();
  if (!model_.failure().empty()) return model_.failure();
  if (options_.device.protected_cache && h.io->syncs() != syncs)
    return "a flush was sent to a device with a protected cache";
  if (!h.io->misuse().empty()) return h.io->misuse();
  return h.store->check_consistency();
}

std::string CrashRun::crash_everywhere(const std::vector<io::SimEvent>& log, io::SimImage start,
                                       size_t from) {
  const Superblock super = layout_of(start);
  io::CrashImages crashes(std::move(start), truth());
  for (size_t at = from; at < log.size(); at++) {
    crashes.advance(log[at]);
    if (at % options_.prefix_stride != 0) continue;
    const bool in_snapshot = crashes.loose_within(super.snapshot_offset[0], super.data_offset);
    const bool discards = crashes.loose_discards();
    for (uint64_t kind = 0; kind < 4; kind++) {
      if (!options_.all_kinds && random_() % 4 != kind) continue;
      coverage_.in_snapshots += in_snapshot;
      coverage_.with_discards += discards;
      std::string wrong = check(lose(crashes, kind), at + 1, kLosses[kind], 0);
      if (!wrong.empty()) return wrong;
    }
  }
  return "";
}

std::string CrashRun::run() {
  // Thousands of recoveries, each with some megabytes: not to be asked of the kernel every time.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  random_.seed(options_.seed + 1);
  Harness h(options_.seed, options_.device);
  if (options_.transfers) h.release_step_chunks = 1;
  h.space = options_.space;
  if (options_.ahead) h.write_ahead_bytes = 1;
  h.records_beside_data = !options_.after;
  h.journal_bytes = 6u << 20;  // about the least: it wraps often
  h.format();
  io::SimImage start = h.io->image();
  const size_t formatted = h.io->log().size();
  h.open(options_.mutants);
  SimHost host(h);  // until nothing is in flight
  std::string wrong = operate(h, host);
  const std::vector<io::SimEvent> log = h.io->log();
  h.settle();  // before the memory of the model's operations goes
  model_.forget_running();
  if (wrong.empty()) wrong = crash_everywhere(log, std::move(start), formatted);
  if (wrong.empty()) return "";
  return wrong + "\nto repeat: FFS_CRASH='" + text_of(options_) + "' test_engine --test-case='crash replay*'";
}

}  // namespace ffs::engine::testing
