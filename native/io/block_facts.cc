#include "io/block_facts.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

#include "base/fd.h"

namespace ffs::io {

namespace {

std::string sysfs_path(dev_t device) {
  return "/sys/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device));
}

// The first line of a small file; empty if there is none.
std::string first_line(const std::string& path) {
  Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[256] = {};
  if (!file.valid() || ::read(file.get(), text, sizeof text - 1) <= 0) return {};
  text[std::strcspn(text, "\n")] = 0;
  return text;
}

uint64_t number_in(const std::string& path) {
  return std::strtoull(first_line(path).c_str(), nullptr, 10);
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  DIR* open = ::opendir(directory.c_str());
  if (open == nullptr) return names;
  while (const dirent* entry = ::readdir(open)) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  ::closedir(open);
  return names;
}

// Field 3 of mountinfo is major:minor, field 5 the mount point.
std::string mounted_at(dev_t device) {
  const std::string wanted = std::to_string(major(device)) + ":" + std::to_string(minor(device));
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string id, parent, number, root, point;
    fields >> id >> parent >> number >> root >> point;
    if (number == wanted) return point;
  }
  return {};
}

bool is_swap(dev_t device) {
  std::ifstream swaps("/proc/swaps");
  for (std::string line; std::getline(swaps, line);) {
    const std::string path = line.substr(0, line.find(' '));
    struct stat status;
    if (::stat(path.c_str(), &status) == 0 && S_ISBLK(status.st_mode) && status.st_rdev == device)
      return true;
  }
  return false;
}

std::string own_user(dev_t device) {
  const std::string point = mounted_at(device);
  if (!point.empty()) return "mounted at " + point;
  if (is_swap(device)) return "in use as swap";
  const auto holders = names_in(sysfs_path(device) + "/holders");
  if (!holders.empty()) return holders.front() + " is built on it";
  return {};
}

bool parse_number(const std::string& text, dev_t* device) {
  unsigned high = 0, low = 0;
  if (std::sscanf(text.c_str(), "%u:%u", &high, &low) != 2) return false;
  *device = makedev(high, low);
  return true;
}

}  // namespace

BlockFacts block_facts(dev_t device) {
  std::string queue = sysfs_path(device) + "/queue/";
  if (::access(queue.c_str(), F_OK) != 0) queue = sysfs_path(device) + "/../queue/";
  BlockFacts facts;
  facts.volatile_cache = first_line(queue + "write_cache") != "write through";
  facts.discard_bytes = number_in(queue + "discard_max_bytes");
  if (facts.discard_bytes > 0)
    facts.discard_granularity = static_cast<uint32_t>(number_in(queue + "discard_granularity"));
  facts.physical_sector_bytes = static_cast<uint32_t>(number_in(queue + "physical_block_size"));
  return facts;
}

std::string user_of(dev_t device) {
  const std::string own = own_user(device);
  if (!own.empty()) return own;
  const std::string here = sysfs_path(device);
  for (const std::string& name : names_in(here)) {
    dev_t part;
    if (::access((here + "/" + name + "/partition").c_str(), F_OK) != 0) continue;
    if (!parse_number(first_line(here + "/" + name + "/dev"), &part)) continue;
    const std::string user = own_user(part);
    if (!user.empty()) return "its partition " + name + ": " + user;
  }
  dev_t disk;
  const bool partition = ::access((here + "/partition").c_str(), F_OK) == 0;
  if (partition && parse_number(first_line(here + "/../dev"), &disk)) {
    const std::string user = own_user(disk);
    if (!user.empty()) return "its disk: " + user;
  }
  return {};
}

}  // namespace ffs::io
