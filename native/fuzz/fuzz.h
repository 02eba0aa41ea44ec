// What fuzzers share: a condition whose failure ends the program, and faults that are done to a text.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#define REQUIRE(condition)                                                 \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

namespace otp::fuzz {

// Does changes to a text, four bytes each: bytes that are replaced, left out or repeated, pieces that are put in, ends.
inline std::string changed(std::string text, const uint8_t* data, size_t size,
                           const std::vector<std::string_view>& pieces = {}) {
  for (; size >= 4; data += 4, size -= 4) {
    const size_t at = text.empty() ? 0 : (data[1] << 8 | data[2]) % text.size();
    switch (data[0] % 5) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(data[3]);
        break;
      case 1:
        text.erase(at, 1 + data[3] % 16);
        break;
      case 2:
        text.insert(at, text.substr(at, data[3]));
        break;
      case 3:
        if (!pieces.empty()) text.insert(at, pieces[data[3] % pieces.size()]);
        break;
      default:
        text.resize(data[3] < 8 ? at : text.size());
    }
  }
  return text;
}

}  // namespace otp::fuzz
