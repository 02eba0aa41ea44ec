#include "core/thread_buffer.h"

namespace otp {

uint32_t NamesByText::ask(Interner& interner, std::string_view name, otp_name_kind kind) {
  InternedName interned = interner.intern(name, kind);
  // A refused name comes back as another text: remembering it would make the next lookup wrong, not only slow.
  if (std::string_view(interned.text, interned.size) == name)
    d_entries[place_of(name)] = {interned.text, interned.size, interned.id};
  return interned.id;
}

void ThreadBuffer::remove_open(int position) {
  uint32_t last = depth.get() - 1;
  for (auto i = static_cast<uint32_t>(position); i < last; ++i) open[i] = open[i + 1];
  depth.set(last);
}

}  // namespace otp
