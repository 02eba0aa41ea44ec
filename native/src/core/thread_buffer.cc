#include "core/thread_buffer.h"

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

uint32_t NameCache::ask(Interner& interner, std::string_view name, otp_name_kind kind) {
  InternedName interned = interner.intern(name, kind);
  // A refused name comes back as another text: remembering it would make the next lookup wrong, not only slow.
  if (std::string_view(interned.text, interned.size) == name)
    d_texts[place_of(name)] = {interned.text, interned.size, interned.id};
  return interned.id;
}

void ThreadBuffer::remove_open(int position) {
  uint32_t last = depth.get() - 1;
  for (auto i = static_cast<uint32_t>(position); i < last; ++i) open[i] = open[i + 1];
  depth.set(last);
}

}  // namespace otp
