#include "core/interner.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace otp {

Interner::Interner() {
  add("");
  d_overflow = add("(more names than the recorder keeps)");
}

InternedName Interner::add(std::string_view name) {
  auto id = static_cast<uint32_t>(d_names.size());
  const std::string& kept = d_names.emplace_back(name);
  d_ids.emplace(std::string_view(kept), id);
  d_bytes += name.size();
  return {kept.c_str(), static_cast<uint32_t>(kept.size()), id};
}

InternedName Interner::intern(std::string_view name) {
  std::lock_guard<std::mutex> hold(d_mutex);
  auto found = d_ids.find(name);
  if (found != d_ids.end()) {
    const std::string& kept = d_names[found->second];
    return {kept.c_str(), static_cast<uint32_t>(kept.size()), found->second};
  }
  if (d_names.size() >= kMaxNames || d_bytes + name.size() > kMaxBytes) {
    ++d_refused;
    return d_overflow;
  }
  try {
    return add(name);
  } catch (const std::bad_alloc&) {
    if (d_names.size() > d_ids.size()) d_names.pop_back();
    ++d_refused;
    return d_overflow;
  }
}

bool Interner::copy(otp_names* out) const {
  std::lock_guard<std::mutex> hold(d_mutex);
  auto* data = static_cast<uint8_t*>(std::malloc(d_bytes + 1));
  auto* ends = static_cast<uint64_t*>(std::malloc(d_names.size() * sizeof(uint64_t)));
  if (data == nullptr || ends == nullptr) {
    std::free(data);
    std::free(ends);
    return false;
  }
  uint64_t at = 0, index = 0;
  for (const std::string& name : d_names) {
    std::memcpy(data + at, name.data(), name.size());
    at += name.size();
    ends[index++] = at;
  }
  *out = {data, ends, d_names.size()};
  return true;
}

uint64_t Interner::size() const {
  std::lock_guard<std::mutex> hold(d_mutex);
  return d_names.size();
}

uint64_t Interner::refused() const {
  std::lock_guard<std::mutex> hold(d_mutex);
  return d_refused;
}

}  // namespace otp
