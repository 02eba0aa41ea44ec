// A black box in a file without a name, and what a reader finds in it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "core_support.h"
#include "otel_torchprof/blackbox_format.h"

constexpr uint64_t kBoxBytes = 2u << 20;  // 26 chunks

// A file of that size with all of its blocks.
class BoxFile {
 public:
  explicit BoxFile(uint64_t bytes = kBoxBytes) : d_bytes(bytes), d_fd(memfd_create("box", 0)) {
    CHECK(d_fd >= 0 && posix_fallocate(d_fd, 0, static_cast<off_t>(bytes)) == 0);
  }
  ~BoxFile() { close(d_fd); }
  BoxFile(const BoxFile&) = delete;
  BoxFile& operator=(const BoxFile&) = delete;

  int fd() const { return d_fd; }
  std::vector<uint8_t> image() const {
    std::vector<uint8_t> found(d_bytes);
    CHECK_EQ(pread(d_fd, found.data(), d_bytes, 0), static_cast<ssize_t>(d_bytes));
    return found;
  }

 private:
  uint64_t d_bytes;
  int d_fd;
};

inline otp_blackbox_options box_options(const BoxFile& file, uint64_t bytes = kBoxBytes) {
  return {file.fd(), bytes, 0, 0, 0, 0, nullptr};
}

// A black box that is open until the end of its scope.
class OpenBox {
 public:
  explicit OpenBox(const otp_blackbox_options& options) { CHECK_EQ(otp_blackbox_open(&options, &d_session), OTP_OK); }
  explicit OpenBox(const BoxFile& file) : OpenBox(box_options(file)) {}
  ~OpenBox() { otp_session_free(d_session); }
  OpenBox(const OpenBox&) = delete;
  OpenBox& operator=(const OpenBox&) = delete;

  otp_session* session() const { return d_session; }

 private:
  otp_session* d_session = nullptr;
};

class Contents {
 public:
  explicit Contents(const std::vector<uint8_t>& image) {
    CHECK_EQ(otp_blackbox_read(-1, image.data(), image.size(), 0, &d_contents), OTP_OK);
    otp_batch* batch = nullptr;
    CHECK_EQ(otp_blackbox_next(d_contents, 0, &batch), OTP_OK);
    CHECK_EQ(batch->watermark, INT64_MAX);
    d_batch = new Batch(batch);
    d_batch->check_sound();
  }
  explicit Contents(const BoxFile& file) : Contents(file.image()) {}
  ~Contents() {
    delete d_batch;
    otp_blackbox_contents_free(d_contents);
  }
  Contents(const Contents&) = delete;
  Contents& operator=(const Contents&) = delete;

  const otp_blackbox_contents* operator->() const { return d_contents; }
  const Batch& batch() const { return *d_batch; }
  bool is_open(const std::string& name) const {
    return ((*d_batch)->flags[d_batch->row(name)] & OTP_FLAG_UNFINISHED) != 0;
  }
  uint64_t count(const std::string& name) const {
    uint64_t found = 0;
    for (uint64_t row = 0; row < (*d_batch)->rows; ++row) found += d_batch->name(row) == name;
    return found;
  }

 private:
  otp_blackbox_contents* d_contents = nullptr;
  Batch* d_batch = nullptr;
};
