// What a fuzz target gives: the entry point (libFuzzer's name) and inputs to begin from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace ffs::fuzz {

std::vector<std::vector<uint8_t>> seeds();

}  // namespace ffs::fuzz
