#include "core/thread_buffer.h"

#include <functional>
#include <string_view>

namespace otp {

bool NameCache::is_unstable(const char* address, uint32_t generation) const {
  for (const Address& entry : d_addresses[set_of(address)])
    if (entry.address == address && entry.generation == generation) return entry.id == kUnstable;
  return false;
}

// The newer of the two stays beside the new one; what an address meant before goes.
void NameCache::keep(const char* address, uint32_t generation, uint32_t id) {
  Address* pair = d_addresses[set_of(address)];
  if (pair[0].address != address) pair[1] = pair[0];
  pair[0] = {address, id, generation};
}

uint32_t NameCache::id_of(Interner& interner, const char* name, uint32_t size) {
  std::string_view wanted = size == UINT32_MAX ? std::string_view(name) : std::string_view(name, size);
  Text& entry = d_texts[std::hash<std::string_view>{}(wanted) % kTexts];
  if (entry.text != nullptr && std::string_view(entry.text, entry.size) == wanted) return entry.id;
  InternedName interned = interner.intern(wanted);
  // A refused name comes back as another text: remembering it would make the next lookup wrong, not only slow.
  if (std::string_view(interned.text, interned.size) == wanted) entry = {interned.text, interned.size, interned.id};
  return interned.id;
}

void ThreadBuffer::remove_open(int position) {
  uint32_t last = depth.get() - 1;
  for (auto i = static_cast<uint32_t>(position); i < last; ++i) open[i] = open[i + 1];
  depth.set(last);
}

}  // namespace otp
