// What the recording threads' side is made of: recorder.cc (begin and end), writable_chunk.cc (a chunk to write to),
// ended_on_another_thread.cc (ends from other threads, coroutines that wait) and context.cc (the span that work belongs
// to).
#pragma once

#include "core/registry.h"

// Where the compiler puts what is seldom run, and what is run at every event: close together, so that inside a model,
// where torch's own code fills the caches, fewer lines and pages have to come back.
#define OTP_COLD __attribute__((noinline, cold))
#define OTP_HOT __attribute__((hot))

namespace otp {

// ---- writable_chunk.cc ----

// Which of the requesting sessions can have a record of this size now; the others' loss is counted when `counted`.
uint32_t make_room_slowpath(ThreadBuffer& thread, uint32_t requested, uint32_t bytes, bool counted);

// Counts an event that has too many around it; once, however many of torch's callbacks report it.
void count_too_deep(ThreadBuffer& thread, uint32_t consumers, const otp_begin_args& args);

// ---- ended_on_another_thread.cc ----

// Takes off the stack of parents what other threads have ended.
void remove_ended_elsewhere(ThreadBuffer& thread);

// The end of an event whose sessions have no chunk of this thread any more.
void end_late_slowpath(ThreadBuffer& thread, uint32_t consumers, uint64_t index, uint64_t ticks, uint8_t flags,
                       uint32_t error);

// Takes an open event out, from the stack or from among those that wait; false where there is none with that key.
bool take_open(ThreadBuffer& thread, const void* key, OpenEvent* out);
bool take_suspended(ThreadBuffer& thread, const void* key, OpenEvent* out);

// Id of the name of an error; 0 for null.
uint32_t intern_error(const char* error_type, uint32_t size);

// As otp_api has them.
int end_elsewhere(const void* key, uint32_t thread_id, uint32_t source_tid, uint8_t flags, const char* error_type,
                  uint32_t error_type_size);
int suspend(const void* key);
int resume(const void* key);

// ---- context.cc ----

// Finds out in which context the thread is: by asking the source, unless this version of it is known, and where that
// knows of none by what was carried here. Called where Python may have run since the last event. False: the process was
// forked meanwhile, and this is the child.
bool refresh_context_slowpath(ThreadBuffer& thread, const otp_context_source* source, uint64_t version);

// Sessions have come to follow contexts while an operator of this thread is open, or the source was being asked. It
// cannot be asked before the operator ends: it may wait for Python, and the thread may hold what Python waits for. They
// get nothing until then.
void note_followers_slowpath(ThreadBuffer& thread);

// ---- recorder.cc ----

uint32_t begin(const otp_begin_args* args);
int end(const void* key, uint8_t flags, const char* error_type, uint32_t error_type_size);
// Of an event that is misnested, suspended, left by an exception, or has sessions that have come or gone since its
// begin; it ended at that time.
int end_slowpath(ThreadBuffer& thread, const void* key, uint64_t ticks, uint8_t flags, const char* error_type,
                 uint32_t error_type_size);

// ---- frames.cc: as otp_api has them ----

uint32_t begin_frame(const void* key, uint32_t name, uint32_t identity, uint32_t consumers);
int end_frame(const void* key, uint8_t flags);
uint32_t end_frames(uint32_t thread_id, uintptr_t without);
// The time, or that of the last thing that the thread has recorded, whichever is later: events are in the order in
// which they began.
uint64_t after_all(const ThreadBuffer& thread, uint64_t ticks);

// ---- for all of them ----

inline bool is_current(const ThreadBuffer& thread) {
  return thread.epoch == g_shared.epoch.load(std::memory_order_relaxed);
}

inline ThreadBuffer* this_thread() {
  ThreadBuffer* thread = t_buffer;
  return __builtin_expect(thread != nullptr, 1) ? thread : this_thread_slowpath();
}

// Before anything that looks at the stack: the memory of an event that ended on another thread, and so its key, may be
// another event's by now.
inline void repair_stack(ThreadBuffer& thread) {
  if (__builtin_expect(thread.ended_elsewhere_flag.load(std::memory_order_relaxed) != 0, 0))
    remove_ended_elsewhere(thread);
}

inline uint32_t known_scope(const ThreadBuffer& thread) {
  return g_shared.all_threads.load(std::memory_order_relaxed) | thread.local.load(std::memory_order_relaxed);
}

// ---- session.cc: as otp_api has it ----

void mute_roots(uint32_t bit, int muted);

}  // namespace otp
