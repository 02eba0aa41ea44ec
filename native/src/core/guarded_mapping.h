// The memory of a file that another process may cut under its user.
#pragma once

#include <cstdint>

namespace otp {

struct MappedRange;

// Maps a file, shared. Where a page of it goes missing (the file is cut, its disk fails) the SIGBUS of whoever touches
// it next is answered with private memory in the place of all of it: it is lost, and the program continues. While any
// is mapped a handler of SIGBUS is installed, on top of what is there; what is not about these files goes to that.
class GuardedMapping {
 public:
  // Throws std::bad_alloc where it cannot be mapped.
  GuardedMapping(int fd, uint64_t bytes);
  ~GuardedMapping();
  GuardedMapping(const GuardedMapping&) = delete;
  GuardedMapping& operator=(const GuardedMapping&) = delete;

  uint8_t* memory() const { return d_begin; }
  // What is written to it is in no file any more.
  bool is_lost() const;
  // Puts private memory in its place, of which nothing was written: for threads that may still touch it. The file is as
  // it was. Again without effect.
  void detach();

  // Puts the handler on top of one that was installed since; 0.1 us where there is none. Any thread.
  static void guard_again();
  // In a forked child: maps private memory over all of them, so that nothing the child writes is in the files, and
  // takes the handler away. Takes no lock.
  static void abandon_all_in_child();

 private:
  void forget_range();

  uint8_t* d_begin;
  uint64_t d_bytes;
  MappedRange* d_range;  // null: it is detached
};

}  // namespace otp
