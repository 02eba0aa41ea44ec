#include "core/interner.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "core/blackbox.h"

namespace otp {

namespace {

constexpr std::string_view kOthers[OTP_NAME_KINDS] = {"(other operators)", "(other functions)", "(other labels)",
                                                      "(other texts)"};
size_t most_names(const NameLimits& limits) {
  size_t names = 0;
  for (const NameLimit& limit : limits) names += limit.names;
  return names;
}

size_t data_bytes(const NameLimits& limits) {
  size_t bytes = 0;
  for (const NameLimit& limit : limits) bytes += limit.bytes;
  return bytes;
}

}  // namespace

// Where so much address space is not to be had (ulimit -v), half of it may be.
Interner::Interner(const NameLimits& limits) : d_left(limits) {
  constexpr int kProtection = PROT_READ | PROT_WRITE, kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = MAP_FAILED;
  for (int tries = 0; memory == MAP_FAILED && tries < 16; ++tries) {
    size_t names = kOwnNames + most_names(d_left);
    d_reserved = names * (sizeof *d_ends + sizeof *d_kinds) + kOwnBytes + data_bytes(d_left);
    memory = mmap(nullptr, d_reserved, kProtection, kFlags, -1, 0);
    if (memory != MAP_FAILED) break;
    for (NameLimit& limit : d_left) limit = {limit.names / 2, limit.bytes / 2};
  }
  if (memory == MAP_FAILED) {
    memory = d_own;
    d_reserved = 0;
    d_left = {};
  }
  lay_out(memory);
}

void Interner::lay_out(void* memory) {
  size_t names = kOwnNames + most_names(d_left);
  d_ends = static_cast<uint64_t*>(memory);
  d_kinds = reinterpret_cast<uint8_t*>(d_ends + names);
  d_data = reinterpret_cast<char*>(d_kinds + names);
  place("", OTP_NAME_OPERATOR);
  for (std::string_view other : kOthers) place(other, OTP_NAME_OPERATOR);
  try {
    for (uint32_t id = 0; id < d_count; ++id) d_ids.emplace(std::string_view(at(id).text, at(id).size), id);
  } catch (const std::bad_alloc&) {  // they are found by their numbers
  }
}

Interner::~Interner() {
  if (d_reserved != 0) munmap(d_ends, d_reserved);
}

InternedName Interner::at(uint32_t id) const {
  uint64_t begin = id == 0 ? 0 : d_ends[id - 1];
  return {d_data + begin, static_cast<uint32_t>(d_ends[id] - begin), id};
}

InternedName Interner::place(std::string_view name, otp_name_kind kind) {
  uint64_t begin = d_count == 0 ? 0 : d_ends[d_count - 1];
  if (!name.empty()) std::memcpy(d_data + begin, name.data(), name.size());
  d_ends[d_count] = begin + name.size();
  d_kinds[d_count] = static_cast<uint8_t>(kind);
  if (d_box != nullptr) d_box->add_name(d_count, name, kind);
  return at(d_count++);
}

InternedName Interner::add(std::string_view name, otp_name_kind kind) {
  char* text = d_data + d_ends[d_count - 1];
  if (!name.empty()) std::memcpy(text, name.data(), name.size());
  d_ids.emplace(std::string_view(text, name.size()), d_count);  // may throw: nothing is taken before it
  return place(name, kind);
}

InternedName Interner::intern(std::string_view name, otp_name_kind kind) {
  std::lock_guard<std::mutex> hold(d_mutex);
  auto found = d_ids.find(name);
  if (found != d_ids.end()) return at(found->second);
  NameLimit& left = d_left[kind];
  if (left.names > 0 && left.bytes >= name.size()) {
    try {
      InternedName added = add(name, kind);
      left = {left.names - 1, left.bytes - name.size()};
      return added;
    } catch (const std::bad_alloc&) {
    }
  }
  ++d_refused[kind];
  return at(1 + kind);
}

void Interner::set_box(BlackBox* box) {
  std::lock_guard<std::mutex> hold(d_mutex);
  d_box = box;
  for (uint32_t id = 0; box != nullptr && id < d_count; ++id) {
    InternedName name = at(id);
    box->add_name(id, {name.text, name.size}, static_cast<otp_name_kind>(d_kinds[id]));
  }
}

std::string_view Interner::text(uint32_t id) const {
  std::lock_guard<std::mutex> hold(d_mutex);
  InternedName name = at(id < d_count ? id : 0);
  return {name.text, name.size};
}

otp_names Interner::view() const {
  std::lock_guard<std::mutex> hold(d_mutex);
  return {reinterpret_cast<const uint8_t*>(d_data), d_ends, d_count, nullptr, nullptr};
}

uint64_t Interner::refused(otp_name_kind kind) const {
  std::lock_guard<std::mutex> hold(d_mutex);
  return d_refused[kind];
}

}  // namespace otp
