// What all processes of a machine say of one hang: a program of ours writes it, once, to a file that they share.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace otp {

// Used by one thread; nothing but a constructor allocates, since the program may hang in an allocation.
class HangReport {
 public:
  enum class Answer {
    kHang,    // the line says what is known
    kSaid,    // that line was returned before
    kNoHang,  // what others wait for still moves, or is held by a debugger
    kNone,    // no report could be made
  };
  static constexpr uint32_t kLine = 1024;

  HangReport() = default;
  // `command`: the program with its arguments, which gets the file as its stdout; none: there are no reports.
  HangReport(std::vector<std::string> command, std::string path);
  HangReport(HangReport&&) = default;
  HangReport& operator=(HangReport&&) = default;

  // The report that was made since a thread has done nothing, or a new one; waits for it some seconds, while
  // `may_wait`. The first process that asks starts the program; the lock of the file, which the program inherits, makes
  // the others wait for it.
  Answer ask(uint64_t idle_ns, const std::atomic<bool>& may_wait, std::string_view* line);

 private:
  Answer read(int file, int64_t written);
  bool start(int file);

  std::vector<std::string> d_command;
  std::vector<char*> d_arguments;
  std::string d_path;
  int64_t d_read = 0;  // when the report that was returned last was written, Unix ns
  bool d_was_hang = false;
  uint32_t d_size = 0;
  std::vector<char> d_line;
};

// Writes a line to stderr, unless nobody reads what is written there.
void write_to_stderr(std::string_view line);

}  // namespace otp
