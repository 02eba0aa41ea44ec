#include "core/thread_buffer.h"

namespace otp {

uint32_t NameCache::remember(Interner& interner, const char* name, uint32_t size) {
  std::string_view wanted = size == UINT32_MAX ? std::string_view(name) : std::string_view(name, size);
  InternedName interned = interner.intern(wanted);
  // A refused name comes back as another text: remembering it would make the next lookup wrong, not only slow.
  if (std::string_view(interned.text, interned.size) == wanted) {
    d_entries[slot(name)] = {name, interned.text, interned.size, interned.id};
  }
  return interned.id;
}

void ThreadBuffer::remove_open(int position) {
  uint32_t last = depth.get() - 1;
  uint64_t below = position == 0 ? 0 : open[position - 1].visible;
  for (auto i = static_cast<uint32_t>(position); i < last; ++i) {
    open[i] = open[i + 1];
    below = open[i].visible = open[i].consumers.get() != 0 ? open[i].index.get() + 1 : below;
  }
  depth.set(last);
}

}  // namespace otp
