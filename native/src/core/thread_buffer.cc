#include "core/thread_buffer.h"

namespace otp {

uint32_t NameCache::remember(Interner& interner, const char* name, uint32_t size, uint32_t generation) {
  std::string_view wanted = size == UINT32_MAX ? std::string_view(name) : std::string_view(name, size);
  InternedName interned = interner.intern(wanted);
  // A refused name comes back as another text: remembering it would make the next lookup wrong, not only slow.
  if (std::string_view(interned.text, interned.size) == wanted) {
    d_entries[slot(name)] = {name, interned.id, generation, interned.text, interned.size};
  }
  return interned.id;
}

void ThreadBuffer::remove_open(int position) {
  uint32_t last = depth.get() - 1;
  for (auto i = static_cast<uint32_t>(position); i < last; ++i) open[i] = open[i + 1];
  depth.set(last);
}

}  // namespace otp
