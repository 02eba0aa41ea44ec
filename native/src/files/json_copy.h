// Copies JSON that is not trusted as JSON that every reader accepts.
#pragma once

#include <cstdint>
#include <string_view>

namespace otp {

// Most bytes per byte that is copied.
constexpr uint64_t kMostCopied = 6;

// Copies a value to `out`, and moves that behind it. Texts become valid: bytes that are no UTF-8 and halves of
// surrogate pairs become U+FFFD, control characters and backslashes that begin no escape are escaped. Words and numbers
// that JSON or viewers do not have, such as NaN or 2^63, become texts. False: it is no JSON, or nested too deeply.
bool copy_json(std::string_view value, char** out);

}  // namespace otp
