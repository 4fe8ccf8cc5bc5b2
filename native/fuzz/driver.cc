// Runs a fuzz target as a plain seeded program: `--runs N --seed S`. Inputs are random bytes and
// mutations of what the target offers as seeds. With clang and -fsanitize=fuzzer the same target is
// driven by libFuzzer instead, and this file isn't linked.
#include "fuzz/fuzz.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

namespace {

using Input = std::vector<uint8_t>;

Input random_bytes(std::mt19937_64& random, size_t most) {
  Input input(random() % (most + 1));
  for (auto& byte : input) byte = static_cast<uint8_t>(random());
  return input;
}

void mutate(Input& input, std::mt19937_64& random) {
  const int changes = 1 + static_cast<int>(random() % 4);
  for (int i = 0; i < changes && !input.empty(); i++) {
    const size_t at = random() % input.size();
    switch (random() % 6) {
      case 0:
        input[at] ^= static_cast<uint8_t>(1u << (random() % 8));
        break;
      case 1:
        input[at] = static_cast<uint8_t>(random());
        break;
      case 2:
        input.resize(at);
        break;
      case 3:
        input.insert(input.begin() + static_cast<ptrdiff_t>(at), static_cast<uint8_t>(random()));
        break;
      case 4: {  // a field at one of its ends
        static const uint32_t values[] = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff, 0x10000};
        const uint32_t value = values[random() % 6];
        if (at + 4 <= input.size()) std::memcpy(input.data() + at, &value, 4);
        break;
      }
      default: {
        const Input tail(input.begin() + static_cast<ptrdiff_t>(at), input.end());
        input.insert(input.end(), tail.begin(), tail.end());
        break;
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = 100000, seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--runs") == 0)
      runs = std::strtoull(argv[i + 1], nullptr, 10);
    else if (std::strcmp(argv[i], "--seed") == 0)
      seed = std::strtoull(argv[i + 1], nullptr, 10);
    else
      return std::fprintf(stderr, "usage: %s [--runs N] [--seed S]\n", argv[0]), 2;
  }
  std::printf("%s: %llu runs from seed %llu\n", argv[0], static_cast<unsigned long long>(runs),
              static_cast<unsigned long long>(seed));
  std::fflush(stdout);  // so that a crash has named its seed
  const std::vector<Input> seeds = ffs::fuzz::seeds();
  for (uint64_t run = 0; run < runs; run++) {
    std::mt19937_64 random(seed * 0x9e3779b97f4a7c15ull + run);
    Input input;
    if (seeds.empty() || random() % 4 == 0) {
      input = random_bytes(random, 2048);
    } else {
      input = seeds[random() % seeds.size()];
      if (run >= seeds.size()) mutate(input, random);
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  return 0;
}
