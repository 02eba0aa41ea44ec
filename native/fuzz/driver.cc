// Runs a fuzzer where libFuzzer is not to be had; takes those of its options that the build uses:
//
//   NAME_fuzz [-runs=N] [-seed=N] [-max_len=N] [-artifact_prefix=PATH]    makes N inputs and tries them
//   NAME_fuzz FILE...                                                     tries these inputs only
//
// Blind where libFuzzer is guided by coverage: it mutates a small pool of earlier inputs. In return the same options
// try the same inputs on every machine. An input that kills the program is written to PATHcrash-SEED-RUN first.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// Weak: it comes with a sanitizer's run-time library.
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {

using Input = std::vector<uint8_t>;

struct Options {
  uint64_t runs = 20000;
  uint64_t seed = 1;
  uint64_t max_len = 4096;
  std::string artifact_prefix;
  std::vector<std::string> files;
};

// What the death callback needs to find: it takes no argument.
Input current_input;
std::string crash_path;

// SplitMix64; the standard library's distributions may differ from one implementation to the next.
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t limit) { return limit == 0 ? 0 : next() % limit; }
};

void write_crash() {
  if (crash_path.empty()) return;
  std::ofstream(crash_path, std::ios::binary)
      .write(reinterpret_cast<const char*>(current_input.data()), static_cast<std::streamsize>(current_input.size()));
  std::fprintf(stderr, "the input is in %s; give that file as the only argument to try it again\n", crash_path.c_str());
}

// A fresh vector of exactly this size per run, so that ASan sees a read beyond its end.
void try_input(const Input& input) {
  current_input = Input(input);
  LLVMFuzzerTestOneInput(current_input.data(), current_input.size());
}

// Zero, one, the edges of every width: where length and sign checks break.
uint64_t edge_value(Random& random) {
  uint64_t power = uint64_t{1} << random.below(64);
  return power - 1 + random.below(3);
}

void insert_random(Random& random, Input& input) {
  Input extra(1 + random.below(32));
  for (uint8_t& byte : extra) byte = static_cast<uint8_t>(random.next());
  input.insert(input.begin() + random.below(input.size() + 1), extra.begin(), extra.end());
}

void mutate(Random& random, Input& input) {
  uint64_t action = input.empty() ? 0 : random.below(5);
  uint64_t at = random.below(input.size());
  uint64_t length = 1 + random.below(std::min<uint64_t>(input.size() - at, 64));
  if (action == 0) {
    insert_random(random, input);
  } else if (action == 1) {
    input[at] ^= static_cast<uint8_t>(1u << random.below(8));
  } else if (action == 2) {
    input.erase(input.begin() + at, input.begin() + at + length);
  } else if (action == 3) {  // Say the same thing again elsewhere.
    Input slice(input.begin() + at, input.begin() + at + length);
    input.insert(input.begin() + random.below(input.size() + 1), slice.begin(), slice.end());
  } else {
    uint64_t value = edge_value(random);
    std::memcpy(&input[at], &value, std::min<uint64_t>(uint64_t{1} << random.below(4), input.size() - at));
  }
}

void fuzz(const Options& options) {
  Random random{options.seed};
  std::vector<Input> pool(64);
  for (uint64_t run = 0; run < options.runs; ++run) {
    // Half of them anew: lines of descent grow to max_len, and all of one line share a beginning.
    Input input = run % 2 == 0 ? Input() : pool[random.below(pool.size())];
    for (uint64_t i = 0, count = 1 + random.below(8); i < count; ++i) mutate(random, input);
    if (input.size() > options.max_len) input.resize(random.below(options.max_len + 1));
    crash_path = options.artifact_prefix + "crash-" + std::to_string(options.seed) + "-" + std::to_string(run);
    try_input(input);
    pool[random.below(pool.size())] = std::move(input);
  }
}

bool replay(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    return false;
  }
  try_input(Input(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()));
  return true;
}

bool parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    size_t equals = argument.find('=');
    std::string name = argument.substr(0, equals);
    std::string value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    if (name == "-runs") {
      options->runs = std::strtoull(value.c_str(), nullptr, 10);
    } else if (name == "-seed") {
      options->seed = std::strtoull(value.c_str(), nullptr, 10);
    } else if (name == "-max_len") {
      options->max_len = std::strtoull(value.c_str(), nullptr, 10);
    } else if (name == "-artifact_prefix") {
      options->artifact_prefix = value;
    } else if (name[0] == '-') {
      std::fprintf(stderr, "unknown option %s: see the top of driver.cc\n", argv[i]);
      return false;
    } else {
      options->files.push_back(argument);
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, &options)) return 2;
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(write_crash);
  for (const std::string& file : options.files) {
    if (!replay(file)) return 2;
  }
  if (options.files.empty()) fuzz(options);
  return 0;
}
